// The two products of decoding from an int8 cache by AMX: exact sums of products of int8, as
// accurate as those in float32.
//
//   q = unit sum over g of 256^g q_g,  q_g signed bytes     k q_g   (keys x 4 digits of 4 queries)
//   w = unit sum over g of 256^g w_g,  w_g unsigned bytes   w_g v   (4 digits of 4 queries x
//   columns)
//
// w are the weights times the scales of v. Units are powers of two: a query has 31 bits and the
// sign, the weights of a block 32 bits, relative to their largest. k is read in place; four rows of
// v are interleaved, as a right tile needs them.
#pragma once

#include <utility>

#include "cpu/attention/decode_rows.h"
#include "cpu/engine/pack.h"
#if defined(__AMX_BF16__)
#include "cpu/engine/amx_tiles.h"
#endif

namespace tk::cpu::TK_ISA {

constexpr int64_t kDigits = 4;
constexpr int64_t kTileLanes = 4;     // queries that share a tile
constexpr int64_t kTileColumns = 16;  // rows too
constexpr int64_t kTileWidth = 64;    // bytes of a row

// True if the products with rows of this type are those of tiles.
template <typename Storage>
constexpr bool kByTiles = false;

template <bool kTiles>
struct TileSession {};

TK_INLINE int64_t tile_groups(int64_t queries) { return (queries + kTileLanes - 1) / kTileLanes; }

// Position of column c of o in the tiles of `interleave`.
TK_INLINE int64_t tile_column(int64_t c) {
  return c / 64 * 64 + c % 16 / 4 * 16 + c % 64 / 16 * 4 + c % 4;
}

#if defined(__AMX_BF16__)

template <>
constexpr bool kByTiles<Int8<float>> = true;

template <>
struct TileSession<true> : AmxSession {};

// A power of two times numbers whose largest magnitude has the exponent field `exponent` makes them
// less than 2^bits; inverse is its reciprocal.
struct Unit {
  float factor, inverse;

  TK_INLINE_METHOD Unit(float largest, uint32_t bits) {
    const uint32_t exponent = bit_cast<uint32_t>(largest) >> 23 & 255;
    const uint32_t field = exponent < bits ? 253 : 253 + bits - exponent;
    factor = bit_cast<float>(field << 23);
    inverse = exponent == 255 ? __builtin_nanf("") : bit_cast<float>((254 - field) << 23);
  }
};

TK_INLINE float largest_magnitude(const float* x, int64_t count) {
  __m512i largest = _mm512_setzero_si512();
  for (int64_t c = 0; c < count; c += 16) {  // as integers, NaN is the largest
    const __m512i bits = _mm512_loadu_si512(x + c);
    largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
  }
  return bit_cast<float>(_mm512_reduce_max_epu32(largest));
}

// Writes the digits of q into right tiles, and the factors of their products: digit g of query n is
// column g kTileLanes + n. The width is a multiple of kTileWidth.
inline void pack_query(const float* q, int64_t width, int64_t n, void* tiles, float* factors) {
  const Unit unit(largest_magnitude(q, width), 30);
  const __m512i middle = _mm512_set1_epi32(0x00808080);
  const __m512i by_digit =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  for (int64_t d = 0; d < width; d += 16) {
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(q + d), _mm512_set1_ps(unit.factor));
    const __m512i sum = _mm512_add_epi32(_mm512_cvtps_epi32(scaled), middle);
    int32_t digits[16];  // four elements each
    _mm512_storeu_si512(digits, _mm512_shuffle_epi8(_mm512_xor_si512(sum, middle), by_digit));
    char* const to =
        static_cast<char*>(tiles) + d / kTileWidth * kTileBytes + d % kTileWidth * kTile;
    for (int64_t m = 0; m < 16; ++m) {
      __builtin_memcpy(to + m / 4 * kTileWidth + (m % 4 * kTileLanes + n) * 4, digits + m, 4);
    }
  }
  for (int64_t g = 0; g < kDigits; ++g) {
    factors[g * kTileLanes + n] = unit.inverse * static_cast<float>(1 << 8 * g);
  }
}

// The products of some tiles of rows, independent of each other, with one group of queries.
template <int... kNumber>
TK_INLINE void multiply_key_tiles(const Rows<Int8<float>>& k, bool prefetches, const char* q,
                                  int64_t width, int32_t* products,
                                  std::integer_sequence<int, kNumber...>) {
  constexpr int64_t N = kTileColumns;
  const auto multiply = [&]<int n>(int64_t d) {
    const char* const rows = reinterpret_cast<const char*>(k.row(n * N)) + d;
    for (int64_t m = 0; prefetches && m < N; ++m) {
      prefetch(rows + m * k.stride, k.prefetch_distance(n * N));
    }
    load_tile<4 + n % 2>(rows, k.stride);
    multiply_signed<n, 4 + n % 2, 6>();
  };
  (clear_tile<kNumber>(), ...);
  for (int64_t d = 0; d < width; d += kTileWidth) {
    load_tile<6>(q + d * N, kTileWidth);
    (multiply.template operator()<kNumber>(d), ...);
  }
  (store_tile<kNumber>(products + kNumber * N * N, 64), ...);
}

// products (groups x kBlock x 16) = k times the digits of each group of queries, from row 0 of
// `products` on. keys is a multiple of 16.
inline void multiply_keys(Rows<Int8<float>> k, int64_t keys, const void* q, int64_t groups,
                          int64_t width, int32_t* products) {
  const auto multiply = [&](int64_t r, auto tiles) {
    for (int64_t g = 0; g < groups; ++g) {
      multiply_key_tiles(k.from(r), g == 0, static_cast<const char*>(q) + g * kTileColumns * width,
                         width, products + (g * kBlock + r) * kTileColumns, tiles);
    }
  };
  int64_t r = 0;
  for (; r + 4 * kTileColumns <= keys; r += 4 * kTileColumns) {
    multiply(r, std::make_integer_sequence<int, 4>());
  }
  for (; r < keys; r += kTileColumns) multiply(r, std::make_integer_sequence<int, 1>());
}

// s (kTileLanes x keys) of the products (keys x 16) of one group.
inline void sum_digits(const int32_t* products, int64_t keys, const float* factors, float* s) {
  const __m512 factor = _mm512_loadu_ps(factors);
  for (int64_t r = 0; r < keys; r += kTile, products += kTile * 16, s += kTile) {
    __m512 x[16];
#pragma GCC unroll 16
    for (int m = 0; m < 16; ++m) {
      x[m] = _mm512_cvtepi32_ps(_mm512_loadu_si512(products + 16 * m)) * factor;
    }
    // Key m, then m + 4, in pairs of digits; then keys m, m + 4, m + 8, m + 12.
#pragma GCC unroll 8
    for (int n = 0; n < 8; ++n) {
      const int m = n / 4 * 8 + n % 4;
      x[m] =
          _mm512_shuffle_f32x4(x[m], x[m + 4], 0x44) + _mm512_shuffle_f32x4(x[m], x[m + 4], 0xee);
    }
#pragma GCC unroll 4
    for (int m = 0; m < 4; ++m) {
      x[m] =
          _mm512_shuffle_f32x4(x[m], x[m + 8], 0x88) + _mm512_shuffle_f32x4(x[m], x[m + 8], 0xdd);
    }
    const __m512 a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpackhi_ps(x[0], x[1]);
    const __m512 c = _mm512_unpacklo_ps(x[2], x[3]), d = _mm512_unpackhi_ps(x[2], x[3]);
    _mm512_storeu_ps(s, _mm512_shuffle_ps(a, c, 0x44));
    _mm512_storeu_ps(s + kBlock, _mm512_shuffle_ps(a, c, 0xee));
    _mm512_storeu_ps(s + 2 * kBlock, _mm512_shuffle_ps(b, d, 0x44));
    _mm512_storeu_ps(s + 3 * kBlock, _mm512_shuffle_ps(b, d, 0xee));
  }
}

// Writes the digits of one query's weights (kBlock, of which `keys` are given) into row
// g kTileLanes + n of a left tile. Returns their unit.
TK_INLINE float pack_weights(const float* weights, int64_t keys, int64_t n, uint8_t* tile) {
  const Unit unit(largest_magnitude(weights, keys), 32);
  for (int64_t r = 0; r < kBlock; r += 16) {
    const __m512 w = r < keys ? _mm512_loadu_ps(weights + r) : _mm512_setzero_ps();
    const __m512i bits = _mm512_cvtps_epu32(_mm512_mul_ps(w, _mm512_set1_ps(unit.factor)));
#pragma GCC unroll 4
    for (int g = 0; g < kDigits; ++g) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(tile + (g * kTileLanes + n) * kTileWidth + r),
                       _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 8 * g)));
    }
  }
  return unit.inverse;
}

// Writes rows of v into right tiles of 16 columns, four rows beside each other. keys is a multiple
// of 16, width of 64.
inline void interleave(Rows<Int8<float>> v, int64_t keys, int64_t width, char* tiles) {
  for (int64_t r = 0; r < keys; r += 4, tiles += kTileWidth) {
    const int64_t ahead = v.prefetch_distance(r);
    for (int64_t c = 0; c < width; c += 64) {
      __m512i x[4];
#pragma GCC unroll 4
      for (int m = 0; m < 4; ++m) {
        const Int8<float>* const from = v.row(r + m) + c;
        prefetch(from, ahead);
        x[m] = _mm512_loadu_si512(from);
      }
      const __m512i low[2] = {_mm512_unpacklo_epi8(x[0], x[1]), _mm512_unpacklo_epi8(x[2], x[3])};
      const __m512i high[2] = {_mm512_unpackhi_epi8(x[0], x[1]), _mm512_unpackhi_epi8(x[2], x[3])};
      char* const to = tiles + c * kTile * 4;
      _mm512_storeu_si512(to, _mm512_unpacklo_epi16(low[0], low[1]));
      _mm512_storeu_si512(to + kTileBytes, _mm512_unpackhi_epi16(low[0], low[1]));
      _mm512_storeu_si512(to + 2 * kTileBytes, _mm512_unpacklo_epi16(high[0], high[1]));
      _mm512_storeu_si512(to + 3 * kTileBytes, _mm512_unpackhi_epi16(high[0], high[1]));
    }
  }
}

// products (width / 16 x 16 x 16) = digits of weights times columns of v.
inline void multiply_values(const uint8_t* weights, const char* v, int64_t width,
                            int32_t* products) {
  load_tile<6>(weights, kTileWidth);
  for (int64_t c = 0; c < width; c += 64, v += 4 * kTileBytes, products += 4 * 256) {
    load_tile<4>(v, 64);
    clear_tile<0>();
    multiply_unsigned<0, 6, 4>();
    load_tile<5>(v + kTileBytes, 64);
    clear_tile<1>();
    multiply_unsigned<1, 6, 5>();
    load_tile<4>(v + 2 * kTileBytes, 64);
    clear_tile<2>();
    multiply_unsigned<2, 6, 4>();
    load_tile<5>(v + 3 * kTileBytes, 64);
    clear_tile<3>();
    multiply_unsigned<3, 6, 5>();
    store_tile<0>(products, 64);
    store_tile<1>(products + 256, 64);
    store_tile<2>(products + 512, 64);
    store_tile<3>(products + 768, 64);
  }
}

// o (lanes x width) += unit times the products of one group.
inline void add_digits(const int32_t* products, int64_t lanes, const float* units, float* o,
                       int64_t width) {
  const __m512 base = _mm512_set1_ps(256);
  for (int64_t c = 0; c < width; c += 16, products += 256) {
    for (int64_t n = 0; n < lanes; ++n) {
      const auto digit = [&](int64_t g) {
        return _mm512_cvtepi32_ps(_mm512_loadu_si512(products + (g * kTileLanes + n) * 16));
      };
      __m512 sum = _mm512_fmadd_ps(digit(3), base, digit(2));
      sum = _mm512_fmadd_ps(sum, base, digit(1));
      sum = _mm512_fmadd_ps(sum, base, digit(0));
      float* const to = o + n * width + c;
      _mm512_storeu_ps(to, _mm512_fmadd_ps(sum, _mm512_set1_ps(units[n]), _mm512_loadu_ps(to)));
    }
  }
}

#endif

}  // namespace tk::cpu::TK_ISA
