// Dropout mask of a tile of keys x queries: docs/attention.md, section 7.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "common/philox.h"
#include "cpu/attention/scores.h"

namespace tk::cpu::TK_ISA {

static_assert(kBlock == kPhiloxColumns);

// Philox multiplies 32 x 32 -> 64 bits: words are in the lower halves of 64-bit lanes, the upper
// halves are arbitrary.
using Words = Vec<uint64_t>;

TK_INLINE Words multiply_words(Words a, uint32_t b) {
  const Words factor = broadcast(uint64_t{b});
#if defined(__AVX512F__)
  return reinterpret_cast<Words>(
      _mm512_mul_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(factor)));
#elif defined(__AVX2__)
  return reinterpret_cast<Words>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(factor)));
#elif defined(__SSE2__)
  return reinterpret_cast<Words>(
      _mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(factor)));
#else
  return (a & 0xffffffffu) * factor;
#endif
}

TK_INLINE void philox_round(const Words (&key)[2], Words (&x)[4]) {
  const Words product0 = multiply_words(x[0], kPhiloxMultiplier[0]);
  const Words product1 = multiply_words(x[2], kPhiloxMultiplier[1]);
  x[0] = (product1 >> 32) ^ x[1] ^ key[0];
  x[1] = product1;
  x[2] = (product0 >> 32) ^ x[3] ^ key[1];
  x[3] = product0;
}

// The first two rounds of Philox, split into a part that depends on the counter only and one that
// depends on the lane only. Precomputed: both products of round 1, and one of round 2 each.
struct PhiloxCounter {
  uint32_t x[3];  // contribution of the counter to words 0, 1 and 2

  PhiloxCounter(const PhiloxKey (&keys)[kPhiloxRounds], uint32_t counter, uint32_t b) {
    const uint64_t first = uint64_t{kPhiloxMultiplier[0]} * counter;
    const uint32_t word2 = static_cast<uint32_t>(first >> 32) ^ b ^ keys[0].word[1];
    const uint64_t second = uint64_t{kPhiloxMultiplier[1]} * word2;
    x[0] = static_cast<uint32_t>(second >> 32) ^ keys[1].word[0];
    x[1] = static_cast<uint32_t>(second);
    x[2] = static_cast<uint32_t>(first) ^ keys[1].word[1];
  }
};

// The lane part; one query in each lane.
struct PhiloxLanes {
  Words x[3];  // contribution of heads h and queries i to words 0, 2 and 3

  PhiloxLanes(const PhiloxKey (&keys)[kPhiloxRounds], Words h, Words i) {
    const Words first = multiply_words(h, kPhiloxMultiplier[1]);
    const Words word0 = (first >> 32) ^ i ^ uint64_t{keys[0].word[0]};
    const Words second = multiply_words(word0, kPhiloxMultiplier[0]);
    x[0] = first;
    x[1] = second >> 32;
    x[2] = second;
  }
};

// Scale of the kept weights.
template <typename Real>
TK_INLINE Real keep_factor(const Problem& p) {
  return static_cast<Real>(tk::keep_factor(p.score.dropout_p));
}

// One bit per lane: x >= threshold.
template <typename Bits>
TK_INLINE uint64_t at_least(Vec<Bits> x, Vec<Bits> threshold) {
#if defined(__AVX512F__)
  const auto a = reinterpret_cast<__m512i>(x), b = reinterpret_cast<__m512i>(threshold);
  return sizeof(Bits) == 4 ? _mm512_cmpge_epu32_mask(a, b) : _mm512_cmpge_epu64_mask(a, b);
#elif defined(__AVX2__)
  const auto mask = x >= threshold;
  return static_cast<uint64_t>(sizeof(Bits) == 4
                                   ? _mm256_movemask_ps(reinterpret_cast<__m256>(mask))
                                   : _mm256_movemask_pd(reinterpret_cast<__m256d>(mask)));
#else
  uint64_t bits = 0;
  for (int lane = 0; lane < kLanes<Bits>; ++lane) {
    bits |= uint64_t{x[lane] >= threshold[lane]} << lane;
  }
  return bits;
#endif
}

// Access to the bits of one vector of lanes within a word, by bytes where they are whole bytes.
// Lanes are written in order: the first write initializes the word.
template <typename Real>
using LaneBits = std::conditional_t<kLanes<Real> == 16, uint16_t, uint8_t>;

template <typename Real>
TK_INLINE uint64_t lane_bits(const uint64_t& keep, int64_t lane) {
  if constexpr (kLanes<Real> < 8) return keep >> lane;
  LaneBits<Real> bits;
  __builtin_memcpy(&bits, reinterpret_cast<const char*>(&keep) + lane / 8, sizeof(bits));
  return bits;
}

template <typename Real>
TK_INLINE void set_lane_bits(uint64_t& keep, int64_t lane, uint64_t bits) {
  if constexpr (kLanes<Real> < 8) {
    keep = (lane == 0 ? 0 : keep) | bits << lane;
  } else {
    const auto piece = static_cast<LaneBits<Real>>(bits);
    __builtin_memcpy(reinterpret_cast<char*>(&keep) + lane / 8, &piece, sizeof(piece));
  }
}

// x where the lane's bit is set, else 0.
template <typename Real>
TK_INLINE Vec<Real> mask_lanes(uint64_t bits, Vec<Real> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Real) == 4) {
    return _mm512_maskz_mov_ps(static_cast<__mmask16>(bits), x);
  } else {
    return _mm512_maskz_mov_pd(static_cast<__mmask8>(bits), x);
  }
#else
  using Int = IntOf<Real>;
  const Vec<Int> bit = broadcast(Int{1}) << iota<Int>();
  return (broadcast(static_cast<Int>(bits)) & bit) != 0 ? x : Vec<Real>{};
#endif
}

// The lane parts of a tile's queries. Lane c of lanes[word][set][n] is query
// (n kLanes<uint64_t> + c) kSets + set.
template <int kSets, int64_t kVectors>
TK_INLINE void lane_parts(const Problem& p, const Block& block,
                          const PhiloxKey (&keys)[kPhiloxRounds],
                          Words (&lanes)[3][kSets][kVectors]) {
  constexpr int64_t kWords = kLanes<uint64_t>, kQueries = kVectors * kSets * kWords;
  for (int set = 0; set < kSets; ++set) {
    for (int64_t n = 0; n < kVectors; ++n) {
      const Words lane = (iota<uint64_t>() + static_cast<uint64_t>(n * kWords)) * kSets + set;
      Words h = broadcast(static_cast<uint64_t>(p.dropout.first_head + block.h));
      Words i = lane + static_cast<uint64_t>(p.dropout.first_row + block.i0);
      if (block.per_head < kQueries) {  // several heads in the tile
        for (int64_t c = 0; c < kWords; ++c) {
          const int64_t at = static_cast<int64_t>(lane[c]);
          h[c] = static_cast<uint64_t>(p.dropout.first_head + block.head(at));
          i[c] = static_cast<uint64_t>(p.dropout.first_row + block.query(at));
        }
      }
      const PhiloxLanes part(keys, h, i);
      for (int word = 0; word < 3; ++word) lanes[word][set][n] = part.x[word];
    }
  }
}

// keep[r], for each key r of a tile of keys x kQueries: bit `lane` is set if the weight is kept.
template <typename Real, int64_t kQueries>
void dropout_bits(const Problem& p, const Block& block, uint64_t* keep) {
  static_assert(kQueries <= 64);
  using Bits = std::conditional_t<sizeof(Real) == 4, uint32_t, uint64_t>;
  constexpr int kSets = sizeof(uint64_t) / sizeof(Real);  // vectors of words per vector of Bits
  constexpr int64_t W = kLanes<Real>;
  // 16-bit random numbers are compared in the upper half of 32 bits.
  const Vec<Bits> threshold = broadcast<Bits>(keep_threshold(p.score.dropout_p) << 16);

  PhiloxKey keys[kPhiloxRounds];
  philox_keys(p.dropout.seed, keys);
  Words round_keys[kPhiloxRounds][2];
  for (int round = 2; round < kPhiloxRounds; ++round) {
    for (int n = 0; n < 2; ++n) round_keys[round][n] = broadcast<uint64_t>(keys[round].word[n]);
  }
  constexpr int64_t kVectors = kQueries / kSets / kLanes<uint64_t>;
  Words lanes[3][kSets][kVectors];
  lane_parts(p, block, keys, lanes);
  for (int64_t counter = 0; counter < kPhiloxCounters; ++counter) {
    const int64_t first = (p.dropout.first_column + block.j0) / kBlock * kPhiloxCounters;
    const PhiloxCounter part(keys, static_cast<uint32_t>(first + counter),
                             static_cast<uint32_t>(p.dropout.first_batch + block.b));
    for (int64_t lane = 0; lane < kQueries; lane += W) {
      Words x[kSets][4];
#pragma GCC unroll 2
      for (int set = 0; set < kSets; ++set) {
        const int64_t n = lane / W;
        x[set][0] = lanes[0][set][n] ^ uint64_t { part.x[0] };
        x[set][1] = broadcast<uint64_t>(part.x[1]);
        x[set][2] = lanes[1][set][n] ^ uint64_t { part.x[2] };
        x[set][3] = lanes[2][set][n];
      }
#pragma GCC unroll 5
      for (int round = 2; round < kPhiloxRounds; ++round) {
#pragma GCC unroll 2
        for (int set = 0; set < kSets; ++set) philox_round(round_keys[round], x[set]);
      }
#pragma GCC unroll 4
      for (int word = 0; word < 4; ++word) {
        const int64_t r = word * 2 * kPhiloxCounters + counter - block.first;
        if (r < 0 || r >= block.keys) continue;
        Words words = x[0][word] & 0xffffffffu;
        if constexpr (kSets == 2) words |= x[kSets - 1][word] << 32;
        const Vec<Bits> upper = reinterpret_cast<Vec<Bits>>(words);
        const Vec<Bits> lower = (upper << 16) & Bits{0xffffffffu};
        set_lane_bits<Real>(keep[r], lane, at_least<Bits>(lower, threshold));
        set_lane_bits<Real>(keep[r + kPhiloxCounters], lane, at_least<Bits>(upper, threshold));
      }
    }
  }
}

}  // namespace tk::cpu::TK_ISA
