// Operands as pairs of bfloat16, for engines that multiply them and accumulate in float32 (amx.h,
// dot.h).
//
// float16 is exactly the sum of two bfloat16, float32 of three: kParts parts.
//
// A tile is 16 rows of 64 bytes: 16 rows or columns of the operand by a depth of 32, as 16 pairs of
// 16-bit elements. A left tile has one row of pairs per operand row. A right tile has one row per
// pair, with an element pair for each column: it is a left tile transposed. Any two depths may form
// a pair if both operands agree: here t and t + 16 where depth is queries or keys, and a pairing
// chosen by the packing code where depth is D.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "cpu/engine/convert.h"
#include "cpu/engine/operand.h"
#include "cpu/engine/prefetch.h"
#include "cpu/engine/vec_math.h"

namespace tk::cpu::TK_ISA {

constexpr int64_t kTile = 16;       // rows of a tile; pairs per row
constexpr int64_t kTileDepth = 32;  // elements per row
constexpr int64_t kTileBytes = 1024;

// Tile (t, g, part) of an operand begins at data + t * stride + (g * kParts + part) * kTileBytes; t
// counts along rows (columns), g along depth.
struct TileOperand {
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

// What engines of pairs share: all but kName, Session and multiply. kParts: bfloat16 numbers per
// element.
template <int kParts>
struct Pairs {
  using Real = float;
  using Left = TileOperand;
  using Right = TileOperand;
  using Product = Term<Left, Right>;
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

 private:
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
};

}  // namespace tk::cpu::TK_ISA
