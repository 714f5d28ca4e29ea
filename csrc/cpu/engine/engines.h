// The engine of each dtype in one instruction set.
#pragma once

#include <algorithm>
#include <cstddef>

#include "common/params.h"
#if defined(__AMX_BF16__)
#include "cpu/engine/amx.h"
#elif defined(__AVX512BF16__)
#include "cpu/engine/dot.h"
#endif
#include "cpu/engine/convert.h"
#include "cpu/engine/fma.h"

namespace tk::cpu::TK_ISA {

#if defined(__AMX_BF16__)
using Float16Engine = Amx<2>;
using BFloat16Engine = Amx<1>;
using Float32Engine = Amx<3>;
#else
using Float16Engine = Fma<float>;
using Float32Engine = Fma<float>;
#if defined(__AVX512BF16__)
using BFloat16Engine = Dot;
#else
using BFloat16Engine = Fma<float>;
#endif
#endif
using NarrowEngine = Fma<float, 32>;  // see is_narrow in attention/kernels.cpp

// run(engine) with the engine of the dtype; for short float32 problems that is the multiply-add
// engine. Engines that split numbers into parts return false if they meet an infinity or NaN; the
// multiply-add engine then repeats the call.
template <typename Run>
void with_engine(DType dtype, bool is_short, Run&& run) {
  if constexpr (kOnlyBFloat16) {
    run(BFloat16Engine{});
  } else {
    bool done = false;
    switch (dtype) {
      case DType::kFloat16:
        done = run(Float16Engine{});
        break;
      case DType::kBFloat16:
        done = run(BFloat16Engine{});
        break;
      case DType::kFloat32:
        done = !is_short && run(Float32Engine{});
        break;
      case DType::kFloat64:
        done = run(Fma<double>{});
        break;
    }
    if (!done) run(Fma<float>{});
  }
}

// The maximum of count(engine), in bytes, over all engines that may run.
template <typename Count>
size_t largest_workspace(DType dtype, bool is_short, Count&& count) {
  size_t bytes = 0;
  with_engine(dtype, is_short, [&](auto engine) {
    bytes = std::max(bytes, count(engine));
    return !decltype(engine)::kSplits;
  });
  return bytes;
}

}  // namespace tk::cpu::TK_ISA
