// AMX engine: multiplies tiles of bfloat16, accumulates in float32.
//
// float16 is exactly the sum of two bfloat16, float32 of three. With x = x0 + x1 + x2 in descending
// magnitude, x y = x0 y0 + (x0 y1 + x1 y0) + (x0 y2 + x1 y1 + x2 y0) up to terms below the last
// bit. kParts parts take 1, 3 (4 to be exact) or 6 products, accumulated in the same float tiles.
//
// A tile is 16 rows of 64 bytes: 16 rows or columns of the operand by a depth of 32, as 16 pairs of
// 16-bit elements. A left tile has one row of pairs per operand row. A right tile has one row per
// pair, with an element pair for each column: it is a left tile transposed. Any two depths may form
// a pair if both operands agree: here t and t + 16 where depth is queries or keys, and a pairing
// chosen by the packing code where depth is D.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "cpu/engine/amx_tiles.h"
#include "cpu/engine/convert.h"
#include "cpu/engine/operand.h"
#include "cpu/engine/prefetch.h"
#include "cpu/engine/vec_math.h"

namespace tk::cpu::TK_ISA {

// Tile (t, g, part) of an operand begins at data + t * stride + (g * kParts + part) * kTileBytes; t
// counts along rows (columns), g along depth.
struct AmxOperand {
  const char* data;
  int64_t stride;
};

// parts[n]: the n-th bfloat16 parts of low (lower halves) and high (upper halves). The first two
// are rounded to nearest, which minimizes the remainder; the third is exact.
template <int kParts>
TK_INLINE void split_pairs(__m512 low, __m512 high, __m512i (&parts)[kParts]) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512i half = _mm512_set1_epi32(0x8000);
#pragma GCC unroll 3
  for (int n = 0; n < kParts; ++n) {
    __m512i a = _mm512_castps_si512(low), b = _mm512_castps_si512(high);
    if (n < 2) {
      a = _mm512_add_epi32(a, half);
      b = _mm512_add_epi32(b, half);
    }
    // (b & upper) | (a >> 16)
    parts[n] = _mm512_ternarylogic_epi32(b, upper, _mm512_srli_epi32(a, 16), 0xea);
    low -= _mm512_castsi512_ps(_mm512_and_si512(a, upper));
    high -= _mm512_castsi512_ps(_mm512_and_si512(b, upper));
  }
}

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

template <int kParts>
struct Amx {
  using Real = float;
  using Left = AmxOperand;
  using Right = AmxOperand;
  using Product = Term<Left, Right>;
  static constexpr const char* kName = "amx";
  static constexpr int64_t kQueries = kParts < 3 ? 32 : 64;
  static constexpr int64_t kGroup = kParts == 1 ? 16 : 8;
  static constexpr int kPending = kParts == 1 ? 4 : kParts == 2 ? 2 : 1;
  static constexpr int64_t kPass = 32;
  static constexpr int64_t kSquare = 2;
  static constexpr int64_t kQueryUnit = 32, kDepthUnit = 32;
  static constexpr int64_t kWidth = 32;
  // With three parts the left operand is read twice: the small products come first.
  static constexpr bool kStreamsLeft = kParts < 3;
  static constexpr Precision kPrecision = kParts < 3 ? Precision::kHalf : Precision::kReal;
  static constexpr bool kSplits = kParts > 1;
  static constexpr int64_t kPairBytes = kParts * kTileBytes;  // one tile, all parts
  static constexpr int64_t kElementBytes = 2 * kParts;        // per operand element

  using Session = AmxSession;

  static PanelLayout layout(unsigned uses, int64_t rows, int64_t width) {
    PanelLayout panel{uses, rows, round_up(width, kWidth), 0, 0, 0, 0, 0};
    const size_t size = static_cast<size_t>(rows * panel.width * 2 * kParts);
    const auto place = [&](Use use) {
      const size_t at = panel.bytes;
      if (uses & use) panel.bytes += size;
      return at;
    };
    panel.left = place(kLeft);
    panel.left_t = place(kLeftT);
    panel.right = place(kRight);
    panel.right_t = place(kRightT);
    return panel;
  }

  // bfloat16 inputs are packed as they are, other dtypes and gradients as float.
  using Stored = std::conditional_t<kParts == 1, BFloat16, float>;
  static constexpr bool kReadsInPlace = true;
  template <typename Element>
  static Element* unpack_to(const PanelLayout&, char*, Element* scratch) {
    return scratch;
  }

  template <typename Element>
  static void pack(const PanelLayout& panel, const PanelRows<Element>& rows, char* to) {
    const unsigned uses = panel.uses;
    if (uses & (kLeft | kRightT)) {
      pack_depth_in_rows(panel, rows, uses & kLeft ? to + panel.left : nullptr,
                         uses & kRightT ? to + panel.right_t : nullptr);
    }
    if (uses & (kRight | kLeftT)) {
      pack_depth_in_columns(panel, rows, uses & kRight ? to + panel.right : nullptr,
                            uses & kLeftT ? to + panel.left_t : nullptr);
    }
  }
  template <typename Element>
  static void pack(const PanelLayout& panel, const Element* rows, int64_t stride, char* to) {
    pack(panel, PanelRows<Element>{rows, stride}, to);
  }

  // The panel from row `row` on, a multiple of 32.
  static Left left(const PanelLayout& panel, const char* from, int64_t row) {
    const int64_t stride = panel.width / kTileDepth * kPairBytes;
    return {from + panel.left + row / kTile * stride, stride};
  }
  static Left left_t(const PanelLayout& panel, const char* from, int64_t row) {
    return {from + panel.left_t + row / kTileDepth * kPairBytes,
            panel.rows / kTileDepth * kPairBytes};
  }
  static Right right(const PanelLayout& panel, const char* from) {
    return {from + panel.right, panel.rows / kTileDepth * kPairBytes};
  }
  // Columns are the rows of the panel from `row` on, a multiple of 16.
  static Right right_t(const PanelLayout& panel, const char* from, int64_t row) {
    const int64_t stride = panel.width / kTileDepth * kPairBytes;
    return {from + panel.right_t + row / kTile * stride, stride};
  }

  // The operand from `depth` on, a multiple of 32.
  static Right from_depth(Right b, int64_t depth) {
    return {b.data + depth / kTileDepth * kPairBytes, b.stride};
  }

  // Operand tile between two products: split into parts again, as left operand, right operand or
  // both.
  template <unsigned kUses, int64_t kRows, int64_t kColumns>
  struct Tile {
    static constexpr bool kOverwrites = false;  // does not overwrite the scores
    static constexpr int64_t kForm = kRows * kColumns * 2 * kParts;
    static constexpr int64_t kLeftStride = kColumns / kTileDepth * kPairBytes;
    static constexpr int64_t kRightStride = kRows / kTileDepth * kPairBytes;
    static constexpr size_t kBytes =
        static_cast<size_t>(kForm) * ((kUses & kLeft ? 1 : 0) + (kUses & kRight ? 1 : 0));
    char* as_left;
    char* as_right;

    Tile(float*, char* memory)
        : as_left(memory), as_right(kUses & kLeft ? memory + kForm : memory) {}

    // x[m][n]: row `row` + 16 m, columns from `column` + 16 n on; row % 32 < 16, column % 32 = 0.
    TK_INLINE_METHOD void put(int64_t row, int64_t column, const Vec<float> (&x)[2][2]) const {
      const int64_t t = row % kTile;
#pragma GCC unroll 2
      for (int n = 0; n < 2; ++n) {
        __m512i parts[kParts];
        if constexpr (kUses & kLeft) {
          split_pairs(x[n][0], x[n][1], parts);
          write(as_left + (row / kTile + n) * kLeftStride + column / kTileDepth * kPairBytes, t,
                parts);
        }
        if constexpr (kUses & kRight) {
          split_pairs(x[0][n], x[1][n], parts);
          write(as_right + (column / kTile + n) * kRightStride + row / kTileDepth * kPairBytes, t,
                parts);
        }
      }
    }
    Left left() const { return {as_left, kLeftStride}; }
    Right right() const { return {as_right, kRightStride}; }

   private:
    TK_INLINE_METHOD void write(char* tile, int64_t t, const __m512i (&parts)[kParts]) const {
#pragma GCC unroll 3
      for (int part = 0; part < kParts; ++part) {
        _mm512_store_si512(tile + part * kTileBytes + t * 64, parts[part]);
      }
    }
  };

  // c (rows x columns, leading dimension ldc) = or += the sum of the terms. rows and columns are
  // multiples of 32; depth is padded with zeros to a multiple of 32.
  template <Accuracy kAccuracy>
  static void multiply(int64_t rows, int64_t columns, const Product* terms, int count, float* c,
                       int64_t ldc, WriteMode mode, LoadPolicy policy = LoadPolicy::kCached) {
    if (kStreamsLeft && policy == LoadPolicy::kStreamed && columns == 2 * kTile) {
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

  // Prefetches the same 32 elements of the panel that is likely to be packed next, `ahead` elements
  // on. float16 rows are not packed in place, so they are not prefetched here.
  template <typename Element>
  TK_INLINE_METHOD static void prefetch_next_panel(const Element* row, int64_t ahead) {
    constexpr int64_t kSize = sizeof(Element);
    if constexpr (kParts != 2) prefetch(row, ahead * kSize, kTileDepth * kSize);
  }

  // Pairs within 32 elements of one row.
  template <typename Element>
  TK_INLINE_METHOD static void pairs_in_row(const Element* row, __m512i (&parts)[kParts]) {
    if constexpr (std::is_same_v<Element, BFloat16>) {
      parts[0] = _mm512_loadu_si512(row);
    } else {
      split_pairs(_mm512_loadu_ps(row), _mm512_loadu_ps(row + kTile), parts);
    }
  }

  // Pairs of two rows, for 2 x 16 columns.
  template <typename Element>
  TK_INLINE_METHOD static void pairs_of_rows(const Element* upper, const Element* lower,
                                             __m512i (&parts)[2][kParts]) {
    if constexpr (std::is_same_v<Element, BFloat16>) {
      // Bit 5 of an index selects the lower row.
      const __m512i first =
          _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38,
                           6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
      const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(kTile));
      const __m512i a = _mm512_loadu_si512(upper), b = _mm512_loadu_si512(lower);
      parts[0][0] = _mm512_permutex2var_epi16(a, first, b);
      parts[1][0] = _mm512_permutex2var_epi16(a, second, b);
    } else {
      for (int n = 0; n < 2; ++n) {
        split_pairs(_mm512_loadu_ps(upper + n * kTile), _mm512_loadu_ps(lower + n * kTile),
                    parts[n]);
      }
    }
  }

  // Stores all parts of one tile to `direct`, and transposed to `transposed`; either may be null.
  static void put_tiles(const __m512i (&pairs)[kParts][kTile], char* direct, char* transposed) {
    for (int part = 0; part < kParts; ++part) {
      Vec<int32_t> square[kTile];
      for (int64_t t = 0; t < kTile; ++t) {
        square[t] = reinterpret_cast<Vec<int32_t>>(pairs[part][t]);
        if (direct) _mm512_store_si512(direct + part * kTileBytes + t * 64, pairs[part][t]);
      }
      if (!transposed) continue;
      transpose<int32_t>(square);
      for (int64_t t = 0; t < kTile; ++t) {
        store(reinterpret_cast<int32_t*>(transposed + part * kTileBytes + t * 64), square[t]);
      }
    }
  }

  // Packs with depth along rows: both elements of a pair are in one row of the panel.
  template <typename Element>
  static void pack_depth_in_rows(const PanelLayout& panel, const PanelRows<Element>& rows,
                                 char* left, char* right_t) {
    const int64_t groups = panel.width / kTileDepth;
    for (int64_t r = 0; r < panel.rows; r += kTile) {
      for (int64_t g = 0; g < groups; ++g) {
        const Element* row = rows.row(r) + g * kTileDepth;
        __m512i pairs[kParts][kTile];
        for (int64_t t = 0; t < kTile; ++t, row += rows.stride) {
          prefetch_next_panel(row, rows.ahead(r));
          __m512i parts[kParts];
          pairs_in_row(row, parts);
          for (int part = 0; part < kParts; ++part) pairs[part][t] = parts[part];
        }
        const int64_t at = (r / kTile * groups + g) * kPairBytes;
        put_tiles(pairs, left ? left + at : nullptr, right_t ? right_t + at : nullptr);
      }
    }
  }

  // Packs with depth along columns: the elements of a pair are in two rows of the panel.
  template <typename Element>
  static void pack_depth_in_columns(const PanelLayout& panel, const PanelRows<Element>& rows,
                                    char* right, char* left_t) {
    const int64_t groups = panel.rows / kTileDepth;
    for (int64_t c = 0; c < panel.width; c += 2 * kTile) {
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t r = g * kTileDepth;
        const Element* upper = rows.row(r) + c;
        const Element* lower = rows.row(r + kTile) + c;
        __m512i pairs[2][kParts][kTile];
        for (int64_t t = 0; t < kTile; ++t, upper += rows.stride, lower += rows.stride) {
          prefetch_next_panel(upper, rows.ahead(r));
          prefetch_next_panel(lower, rows.ahead(r + kTile));
          __m512i parts[2][kParts];
          pairs_of_rows(upper, lower, parts);
          for (int n = 0; n < 2; ++n) {
            for (int part = 0; part < kParts; ++part) pairs[n][part][t] = parts[n][part];
          }
        }
        for (int n = 0; n < 2; ++n) {
          const int64_t at = ((c / kTile + n) * groups + g) * kPairBytes;
          put_tiles(pairs[n], right ? right + at : nullptr, left_t ? left_t + at : nullptr);
        }
      }
    }
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
