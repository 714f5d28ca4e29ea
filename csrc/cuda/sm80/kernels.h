// The kernels of one element type and width, as the host calls them; plain C++.
#pragma once

#include <cstddef>

#include "common/kv_cache.h"
#include "common/params.h"
#include "cuda/common/call.h"

namespace tk::cuda {

struct Kernels {
  void (*forward)(const ForwardParams&, const Call&);
  size_t (*backward_workspace)(const BackwardParams&, const Call&);
  void (*backward)(const BackwardParams&, const Call&, void* workspace, bool deterministic);
  // dbias alone, beside a backward pass of other kernels.
  size_t (*bias_gradient_workspace)(const BackwardParams&, const Call&);
  void (*bias_gradient)(const BackwardParams&, const Call&, void* workspace);
  size_t (*decode_workspace)(const ForwardParams&);
  void (*decode)(const ForwardParams&, const KVCache&, void* workspace, void* stream);
};

// Each is compiled by itself, from kernels.cu with -DTK_ELEMENT and -DTK_WIDTH.
template <typename Element, int kWidth>
const Kernels& kernels();

}  // namespace tk::cuda
