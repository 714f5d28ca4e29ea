// Dot engine: multiplies vectors of bfloat16 pairs (pairs.h) by vdpbf16ps, accumulates in float32.
// An instruction computes 32 multiply-adds, twice those of float32.
#pragma once

#include <cstring>

#include "cpu/engine/pairs.h"
#if defined(TK_EMULATE_BFLOAT16)
#include "cpu/engine/amx_tiles_emulated.h"
#endif

namespace tk::cpu::TK_ISA {

#if defined(TK_EMULATE_BFLOAT16)

using DotRounding = EmulatedRounding;

// vdpbf16ps for tests on a CPU without it: the second elements first, by fused multiply-adds. Only
// the payloads of NaN may differ.
TK_INLINE __m512 add_products(__m512 sum, __m512i a, __m512i b) {
  sum = _mm512_fmadd_ps(second_elements(a), second_elements(b), sum);
  return _mm512_fmadd_ps(first_elements(a), first_elements(b), sum);
}

#else

struct DotRounding {};

TK_INLINE __m512 add_products(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

#endif

// The memory layout, blocks and rounding are those of Amx<1>.
struct Dot : Pairs<1> {
  struct Session {};  // no setup
  static constexpr const char* kName = "dot";
  static constexpr bool kStreamsLeft = false;

  // c (rows x columns, leading dimension ldc) = or += the sum of the terms. rows and columns are
  // multiples of 32; depth is padded with zeros to a multiple of 32.
  template <Accuracy>
  static void multiply(int64_t rows, int64_t columns, const Product* terms, int count, float* c,
                       int64_t ldc, WriteMode mode, LoadPolicy = LoadPolicy::kCached) {
    [[maybe_unused]] const DotRounding rounding;
    for (int64_t n = 0; n < columns; n += kStripColumns) {
      for (int64_t r = 0; r < rows; r += kStripRows) {
        multiply_strip(r, n, terms, count, c + r * ldc + n, ldc, mode);
      }
    }
  }

 private:
  // 16 accumulators, two vectors of b, one pair of a: 19 of 32 registers.
  static constexpr int64_t kStripRows = 8, kStripColumns = 2 * kTile;

  // Not inlined: compilers move arithmetic past a change of MXCSR.
  __attribute__((noinline)) static void multiply_strip(int64_t row, int64_t column,
                                                       const Product* terms, int count, float* c,
                                                       int64_t ldc, WriteMode mode) {
    __m512 sum[kStripRows][2] = {};
    for (int n = 0; n < count; ++n) {
      const auto& [left, right, depth] = terms[n];
      const char* a = left.data + row / kTile * left.stride + row % kTile * 64;
      const char* b = right.data + column / kTile * right.stride;
      for (int64_t d = 0; d < depth; d += kTileDepth, a += kTileBytes, b += kTileBytes) {
        for (int64_t pair = 0; pair < kTile; ++pair) {
          add_pair(a + pair * 4, b + pair * 64, right.stride, sum);
        }
      }
    }
    // Adding to c last keeps addition chains short, as in fma.h.
#pragma GCC unroll 8
    for (int64_t r = 0; r < kStripRows; ++r) {
#pragma GCC unroll 2
      for (int64_t n = 0; n < 2; ++n) {
        float* const to = c + r * ldc + n * kTile;
        if (mode == WriteMode::kAccumulate) sum[r][n] += _mm512_load_ps(to);
        _mm512_store_ps(to, sum[r][n]);
      }
    }
  }

  // One pair of depths: a column of a, a row of b.
  TK_INLINE_METHOD static void add_pair(const char* a, const char* b, int64_t b_stride,
                                        __m512 (&sum)[kStripRows][2]) {
    const __m512i right[2] = {_mm512_load_si512(b), _mm512_load_si512(b + b_stride)};
#pragma GCC unroll 8
    for (int64_t r = 0; r < kStripRows; ++r) {
      int32_t pair;
      std::memcpy(&pair, a + r * 64, 4);
      const __m512i left = _mm512_set1_epi32(pair);
#pragma GCC unroll 2
      for (int n = 0; n < 2; ++n) sum[r][n] = add_products(sum[r][n], left, right[n]);
    }
  }
};

}  // namespace tk::cpu::TK_ISA
