// AMX engine: multiplies tiles of bfloat16 pairs (pairs.h), accumulates in float32.
//
// With x = x0 + x1 + x2 in descending magnitude, x y = x0 y0 + (x0 y1 + x1 y0) + (x0 y2 + x1 y1 +
// x2 y0) up to terms below the last bit. kParts parts take 1, 3 (4 to be exact) or 6 products,
// accumulated in the same float tiles.
#pragma once

#include "cpu/engine/amx_tiles.h"
#include "cpu/engine/pairs.h"

namespace tk::cpu::TK_ISA {

// A square of 2 x 2 tiles of c, in tiles 0 to 3; a is in tiles 4 and 5, b in 6 and 7. Four
// consecutive stores would stall the loads that follow, so a square is stored tile by tile while
// the next one begins. kStreamed: no other square reads the same tiles of a.
template <bool kStreamed>
struct AmxSquares {
  float* previous = nullptr;  // the square not yet stored
  float* current = nullptr;
  int64_t ldc;  // leading dimension of c
  WriteMode mode;

  template <int kNumber>
  TK_INLINE_METHOD void begin_tile() const {
    const int64_t at = kNumber / 2 * kTile * ldc + kNumber % 2 * kTile;
    if (previous) store_tile<kNumber>(previous + at, ldc * 4);
    mode == WriteMode::kAccumulate ? load_tile<kNumber>(current + at, ldc * 4)
                                   : clear_tile<kNumber>();
  }

  template <int kNumber>
  TK_INLINE_METHOD static void load_a(const char* from) {
    kStreamed ? load_tile_streamed<kNumber>(from, 64) : load_tile<kNumber>(from, 64);
  }

  // One product of the current parts of a and b, which are loaded where they change. The first step
  // of a square also initializes the tiles of c.
  template <bool kFirst, bool kNewA, bool kNewB>
  TK_INLINE_METHOD void step(const char* a, int64_t a_stride, const char* b,
                             int64_t b_stride) const {
    if constexpr (kNewA) load_a<4>(a);
    if constexpr (kNewB) load_tile<6>(b, 64);
    if constexpr (kFirst) begin_tile<0>();
    multiply_tile<0, 4, 6>();
    if constexpr (kNewB) load_tile<7>(b + b_stride, 64);
    if constexpr (kFirst) begin_tile<1>();
    multiply_tile<1, 4, 7>();
    if constexpr (kNewA) load_a<5>(a + a_stride);
    if constexpr (kFirst) begin_tile<2>();
    multiply_tile<2, 5, 6>();
    if constexpr (kFirst) begin_tile<3>();
    multiply_tile<3, 5, 7>();
  }

  // Two parts each. The product of the two second parts is at most 2^-18 of the total.
  template <Accuracy kAccuracy, bool kFirst>
  TK_INLINE_METHOD void steps_of_two(const char* a, int64_t a_stride, const char* b,
                                     int64_t b_stride) const {
    constexpr int64_t T = kTileBytes;
    constexpr bool kFull = kAccuracy == Accuracy::kFull;
    if constexpr (kFull) step<kFirst, true, true>(a + T, a_stride, b + T, b_stride);
    step<kFirst && !kFull, !kFull, true>(a + T, a_stride, b, b_stride);
    step<false, true, false>(a, a_stride, b, b_stride);
    step<false, false, true>(a, a_stride, b + T, b_stride);
  }

  // Three parts each: the small products. They precede the product of the first parts, next to
  // which they would be rounded away.
  template <bool kFirst>
  TK_INLINE_METHOD void small_steps_of_three(const char* a, int64_t a_stride, const char* b,
                                             int64_t b_stride) const {
    constexpr int64_t T = kTileBytes;
    step<kFirst, true, true>(a + 2 * T, a_stride, b, b_stride);
    step<false, true, false>(a + T, a_stride, b, b_stride);
    step<false, false, true>(a + T, a_stride, b + T, b_stride);
    step<false, true, false>(a, a_stride, b + T, b_stride);
    step<false, false, true>(a, a_stride, b + 2 * T, b_stride);
  }

  TK_INLINE_METHOD void store_last() const {
    store_tile<0>(current, ldc * 4);
    store_tile<1>(current + kTile, ldc * 4);
    store_tile<2>(current + kTile * ldc, ldc * 4);
    store_tile<3>(current + kTile * ldc + kTile, ldc * 4);
  }
};

// kParts: bfloat16 numbers per element.
template <int kParts>
struct Amx : Pairs<kParts> {
  using Session = AmxSession;
  using typename Pairs<kParts>::Left;
  using typename Pairs<kParts>::Right;
  using typename Pairs<kParts>::Product;
  using Pairs<kParts>::kPairBytes;
  static constexpr const char* kName = "amx";

  // c (rows x columns, leading dimension ldc) = or += the sum of the terms. rows and columns are
  // multiples of 32; depth is padded with zeros to a multiple of 32.
  template <Accuracy kAccuracy>
  static void multiply(int64_t rows, int64_t columns, const Product* terms, int count, float* c,
                       int64_t ldc, WriteMode mode, LoadPolicy policy = LoadPolicy::kCached) {
    if (Amx::kStreamsLeft && policy == LoadPolicy::kStreamed && columns == 2 * kTile) {
      multiply_squares<kAccuracy, true>(rows, columns, terms, count, c, ldc, mode);
    } else {
      multiply_squares<kAccuracy, false>(rows, columns, terms, count, c, ldc, mode);
    }
  }

 private:
  template <Accuracy kAccuracy, bool kStreamed>
  TK_INLINE_METHOD static void multiply_squares(int64_t rows, int64_t columns, const Product* terms,
                                                int count, float* c, int64_t ldc, WriteMode mode) {
    AmxSquares<kStreamed> squares{.ldc = ldc, .mode = mode};
    for (int64_t r = 0; r < rows; r += 2 * kTile) {
      for (int64_t n = 0; n < columns; n += 2 * kTile) {
        squares.previous = squares.current;
        squares.current = c + r * ldc + n;
        if constexpr (kParts == 3) {
          for_each_step(terms, count, r, n, [&]<bool kFirst>(auto... operands) TK_INLINE_LAMBDA {
            squares.template small_steps_of_three<kFirst>(operands...);
          });
        }
        for_each_step(terms, count, r, n, [&]<bool kFirst>(auto... operands) TK_INLINE_LAMBDA {
          if constexpr (kParts == 2) {
            squares.template steps_of_two<kAccuracy, kFirst>(operands...);
          } else {
            squares.template step<kFirst && kParts == 1, true, true>(operands...);
          }
        });
      }
    }
    squares.store_last();
  }

  // visit<first>(a, its stride, b, its stride) over the depth of every term.
  template <typename Visit>
  TK_INLINE_METHOD static void for_each_step(const Product* terms, int count, int64_t row,
                                             int64_t column, Visit&& visit) {
    for (int n = 0; n < count; ++n) {
      const Left& left = terms[n].a;
      const Right& right = terms[n].b;
      const char* a = left.data + row / kTile * left.stride;
      const char* b = right.data + column / kTile * right.stride;
      const int64_t groups = (terms[n].depth + kTileDepth - 1) / kTileDepth;
      for (int64_t g = 0; g < groups; ++g, a += kPairBytes, b += kPairBytes) {
        if (n == 0 && g == 0) {
          visit.template operator()<true>(a, left.stride, b, right.stride);
        } else {
          visit.template operator()<false>(a, left.stride, b, right.stride);
        }
      }
    }
  }
};

}  // namespace tk::cpu::TK_ISA
