// The engine that multiplies by AMX tiles of bfloat16 and sums in float.
//
// float16 is exactly the sum of two bfloat16, float of three. With x = x0 + x1 + x2 by falling
// size, x y = x0 y0 + (x0 y1 + x1 y0) + (x0 y2 + x1 y1 + x2 y0) but for terms below the last bit:
// kParts parts take 1, 3 (4 to be exact) or 6 products, which add up in the same float tiles.
//
// A tile is 16 rows of 64 bytes: 16 rows or columns of the operand by 32 of depth, in 16 pairs of
// 32 bits. A left tile has a row of pairs for each of its operand's rows; a right tile a row of
// columns for each pair. One is the other transposed. Pairs are of any two depths, if only both
// operands agree: of t and t + 16 where depth is queries or keys, and varlen chooses where it is
// D.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "cpu/engine/convert.h"
#include "cpu/engine/operand.h"
#include "cpu/engine/prefetch.h"
#include "cpu/engine/vec_math.h"

namespace tk::cpu::TK_ISA {

constexpr int64_t kTile = 16;       // rows of a tile; pairs in a row
constexpr int64_t kTileDepth = 32;  // elements in a row
constexpr int64_t kTileBytes = 1024;

// Tile (t, g, part) of an operand begins at data + t * stride + (g * kParts + part) * kTileBytes;
// t counts rows (columns), g depth.
struct AmxOperand {
  const char* data;
  int64_t stride;
};

// A constant: of one on the stack GCC 12 keeps only the stores to the first 8 bytes, which is all
// that its intrinsic names as an input.
struct alignas(64) AmxConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {kTile, kTile, kTile, kTile, kTile, kTile, kTile, kTile};
};
constexpr AmxConfig kAllTiles;

// All eight tiles are 16 x 64 bytes while a Session lives.
class AmxSession {
 public:
  AmxSession() { _tile_loadconfig(&kAllTiles); }
  ~AmxSession() { _tile_release(); }
  AmxSession(const AmxSession&) = delete;
  AmxSession& operator=(const AmxSession&) = delete;
};

// parts[n]: the n-th parts of low in the low halves, of high in the high ones. Each is rounded to
// nearest, which leaves the least to those that follow; of a third part there is nothing to round.
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

// The compiler's intrinsics take a tile's number only as a literal.
template <int kNumber>
TK_INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kNumber) : "memory");
}
// Past the first-level cache, where there is no second reader: what lies there stays there.
template <int kNumber>
TK_INLINE void load_tile_once(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kNumber) : "memory");
}
template <int kNumber>
TK_INLINE void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kNumber) : "memory");
}
template <int kNumber>
TK_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kNumber));
}
template <int kC, int kA, int kB>
TK_INLINE void multiply_tile() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

// A square of 2 x 2 tiles of c, in tiles 0 to 3; a is in 4 and 5, b in 6 and 7. Four stores in a
// row would stall the loads that follow: a square is stored tile by tile where the next one begins.
// kOnce: no other square reads the same tiles of a.
template <bool kOnce>
struct AmxSquares {
  float* before = nullptr;  // the square that is still to be stored
  float* now = nullptr;
  int64_t ldc;  // of c
  Into into;

  template <int kNumber>
  TK_INLINE_METHOD void begin_tile() const {
    const int64_t at = kNumber / 2 * kTile * ldc + kNumber % 2 * kTile;
    if (before) store_tile<kNumber>(before + at, ldc * 4);
    into == Into::kSum ? load_tile<kNumber>(now + at, ldc * 4) : clear_tile<kNumber>();
  }

  template <int kNumber>
  TK_INLINE_METHOD static void load_a(const char* from) {
    kOnce ? load_tile_once<kNumber>(from, 64) : load_tile<kNumber>(from, 64);
  }

  // The next parts of a and b, where they change; c is begun at a square's first step.
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

  // Two parts each. The product of both second parts is 2^-18 of the whole at most.
  template <Exact kExact, bool kFirst>
  TK_INLINE_METHOD void steps_of_two(const char* a, int64_t a_stride, const char* b,
                                     int64_t b_stride) const {
    constexpr int64_t T = kTileBytes;
    constexpr bool kFully = kExact == Exact::kFully;
    if constexpr (kFully) step<kFirst, true, true>(a + T, a_stride, b + T, b_stride);
    step<kFirst && !kFully, !kFully, true>(a + T, a_stride, b, b_stride);
    step<false, true, false>(a, a_stride, b, b_stride);
    step<false, false, true>(a, a_stride, b + T, b_stride);
  }

  // Three parts each: the products before that of both first parts, which would round them away.
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
    store_tile<0>(now, ldc * 4);
    store_tile<1>(now + kTile, ldc * 4);
    store_tile<2>(now + kTile * ldc, ldc * 4);
    store_tile<3>(now + kTile * ldc + kTile, ldc * 4);
  }
};

template <int kParts>
struct Amx {
  using Real = float;
  using Left = AmxOperand;
  using Right = AmxOperand;
  using Product = Term<Left, Right>;
  static constexpr int64_t kQueries = kParts < 3 ? 32 : 64;
  static constexpr int64_t kGroup = kParts == 1 ? 16 : 8;
  static constexpr int kPending = kParts == 1 ? 4 : kParts == 2 ? 2 : 1;
  static constexpr int64_t kPass = 32;
  static constexpr int64_t kSquare = 2;
  static constexpr int64_t kWidth = 32;
  // Three parts are read twice: once for the small products.
  static constexpr bool kReadsOnce = kParts < 3;
  static constexpr Precision kPrecision = kParts < 3 ? Precision::kHalf : Precision::kReal;
  static constexpr bool kSplits = kParts > 1;
  static constexpr int64_t kPairBytes = kParts * kTileBytes;  // of one depth of a tile, all parts
  static constexpr int64_t kElementBytes = 2 * kParts;        // of an operand

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

  // bfloat16 is packed from its bits, anything else as float.
  using Stored = std::conditional_t<kParts == 1, BFloat16, float>;
  static constexpr bool kReadsInPlace = true;
  static Stored* unpack_to(const PanelLayout&, char*, Stored* scratch) { return scratch; }

  static void pack(const PanelLayout& panel, const Stored* rows, int64_t stride, char* to) {
    const unsigned uses = panel.uses;
    if (uses & (kLeft | kRightT)) {
      pack_depth_in_rows(panel, rows, stride, uses & kLeft ? to + panel.left : nullptr,
                         uses & kRightT ? to + panel.right_t : nullptr);
    }
    if (uses & (kRight | kLeftT)) {
      pack_depth_in_columns(panel, rows, stride, uses & kRight ? to + panel.right : nullptr,
                            uses & kLeftT ? to + panel.left_t : nullptr);
    }
  }

  // From row `row` on, a multiple of 32.
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
  // Its columns are the panel's rows, and begin with row `row`, a multiple of 16.
  static Right right_t(const PanelLayout& panel, const char* from, int64_t row) {
    const int64_t stride = panel.width / kTileDepth * kPairBytes;
    return {from + panel.right_t + row / kTile * stride, stride};
  }

  // A tile between two products: split anew, as a left operand, a right one, or both.
  template <unsigned kUses, int64_t kRows, int64_t kColumns>
  struct Tile {
    static constexpr bool kOverwrites = false;  // the scores
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
  // multiples of 32; depth is filled up with zeros to one.
  template <Exact kExact>
  static void multiply(int64_t rows, int64_t columns, const Product* terms, int count, float* c,
                       int64_t ldc, Into into, Reads reads = Reads::kAgain) {
    if (kReadsOnce && reads == Reads::kOnce && columns == 2 * kTile) {
      multiply_squares<kExact, true>(rows, columns, terms, count, c, ldc, into);
    } else {
      multiply_squares<kExact, false>(rows, columns, terms, count, c, ldc, into);
    }
  }

 private:
  template <Exact kExact, bool kOnce>
  TK_INLINE_METHOD static void multiply_squares(int64_t rows, int64_t columns, const Product* terms,
                                                int count, float* c, int64_t ldc, Into into) {
    AmxSquares<kOnce> squares{.ldc = ldc, .into = into};
    for (int64_t r = 0; r < rows; r += 2 * kTile) {
      for (int64_t n = 0; n < columns; n += 2 * kTile) {
        squares.before = squares.now;
        squares.now = c + r * ldc + n;
        if constexpr (kParts == 3) {
          for_each_step(terms, count, r, n, [&]<bool kFirst>(auto... operands) TK_INLINE_LAMBDA {
            squares.template small_steps_of_three<kFirst>(operands...);
          });
        }
        for_each_step(terms, count, r, n, [&]<bool kFirst>(auto... operands) TK_INLINE_LAMBDA {
          if constexpr (kParts == 2) {
            squares.template steps_of_two<kExact, kFirst>(operands...);
          } else {
            squares.template step<kFirst && kParts == 1, true, true>(operands...);
          }
        });
      }
    }
    squares.store_last();
  }

  // The same 32 elements of the panel that is likely to be packed next, `ahead` elements on. Rows
  // of float16 are not packed where they lie.
  TK_INLINE_METHOD static void fetch(const Stored* row, int64_t ahead) {
    constexpr int64_t kSize = sizeof(Stored);
    if constexpr (kParts != 2) prefetch(row, ahead * kSize, kTileDepth * kSize);
  }

  // The pairs of 32 elements of one row.
  TK_INLINE_METHOD static void pairs_in_row(const Stored* row, __m512i (&parts)[kParts]) {
    if constexpr (kParts == 1) {
      parts[0] = _mm512_loadu_si512(row);
    } else {
      split_pairs(_mm512_loadu_ps(row), _mm512_loadu_ps(row + kTile), parts);
    }
  }

  // The pairs of 2 x 16 columns of two rows.
  TK_INLINE_METHOD static void pairs_of_rows(const Stored* upper, const Stored* lower,
                                             __m512i (&parts)[2][kParts]) {
    if constexpr (kParts == 1) {
      // Words of the lower row have bit 5 set.
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

  // One tile's parts as they are to `straight`, transposed to `turned`; either may be null.
  static void put_tiles(const __m512i (&pairs)[kParts][kTile], char* straight, char* turned) {
    for (int part = 0; part < kParts; ++part) {
      Vec<int32_t> square[kTile];
      for (int64_t t = 0; t < kTile; ++t) {
        square[t] = reinterpret_cast<Vec<int32_t>>(pairs[part][t]);
        if (straight) _mm512_store_si512(straight + part * kTileBytes + t * 64, pairs[part][t]);
      }
      if (!turned) continue;
      transpose<int32_t>(square);
      for (int64_t t = 0; t < kTile; ++t) {
        store(reinterpret_cast<int32_t*>(turned + part * kTileBytes + t * 64), square[t]);
      }
    }
  }

  // Depth along the rows: pairs lie in one row of the panel.
  static void pack_depth_in_rows(const PanelLayout& panel, const Stored* rows, int64_t stride,
                                 char* left, char* right_t) {
    const int64_t groups = panel.width / kTileDepth;
    for (int64_t r = 0; r < panel.rows; r += kTile) {
      for (int64_t g = 0; g < groups; ++g) {
        __m512i pairs[kParts][kTile];
        for (int64_t t = 0; t < kTile; ++t) {
          const Stored* row = rows + (r + t) * stride + g * kTileDepth;
          fetch(row, panel.rows * stride);
          __m512i parts[kParts];
          pairs_in_row(row, parts);
          for (int part = 0; part < kParts; ++part) pairs[part][t] = parts[part];
        }
        const int64_t at = (r / kTile * groups + g) * kPairBytes;
        put_tiles(pairs, left ? left + at : nullptr, right_t ? right_t + at : nullptr);
      }
    }
  }

  // Depth down the columns: pairs lie in two rows of the panel.
  static void pack_depth_in_columns(const PanelLayout& panel, const Stored* rows, int64_t stride,
                                    char* right, char* left_t) {
    const int64_t groups = panel.rows / kTileDepth;
    for (int64_t c = 0; c < panel.width; c += 2 * kTile) {
      for (int64_t g = 0; g < groups; ++g) {
        __m512i pairs[2][kParts][kTile];
        for (int64_t t = 0; t < kTile; ++t) {
          const Stored* upper = rows + (g * kTileDepth + t) * stride + c;
          const Stored* lower = upper + kTile * stride;
          fetch(upper, panel.rows * stride);
          fetch(lower, panel.rows * stride);
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

  // visit<first>(a, its stride, b, its stride) for all the depth of every term.
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
