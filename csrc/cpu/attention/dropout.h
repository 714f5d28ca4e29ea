// Dropout mask of a tile of keys x queries: docs/attention.md, section 7.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "common/philox.h"
#include "cpu/attention/scores.h"

namespace tk::cpu::TK_ISA {

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

// The bits of counters: those of `first` on belong to queries first / 8 * 16 + first % 8 on, or to
// the 8 after them. Words are written in order.
template <typename Real>
TK_INLINE void set_paired_bits(uint64_t& keep, int64_t first, int word, uint64_t bits) {
  const int64_t lane = first / 8 * 16 + first % 8 + 8 * word;
  if constexpr (kLanes<Real> < 8) {
    set_lane_bits<Real>(keep, lane, bits);
  } else {
    for (int64_t byte = 0; byte < kLanes<Real> / 8; ++byte) {
      reinterpret_cast<uint8_t*>(&keep)[lane / 8 + 2 * byte] =
          static_cast<uint8_t>(bits >> 8 * byte);
    }
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

// The part of Philox that depends on the lanes only: the product of round 0, and the keys. If
// kPaired, each lane holds the counter of two queries, i and i + 8 of a block of 16: lane n that of
// queries n / 8 * 16 + n % 8 and 8 more. Otherwise it holds that of query n, which needs one of the
// two words.
template <typename Real, bool kPaired, int64_t kQueries>
struct PhiloxLanes {
  static constexpr int kSets = sizeof(uint64_t) / sizeof(Real);  // vectors of words per Vec<Real>
  static constexpr int64_t kVectors = kQueries / kLanes<Real> / (kPaired ? 2 : 1);

  Words product[kVectors][kSets];
  Words key[kPaired ? 1 : kVectors][kSets];  // paired lanes are of one head
  Words is_second[kVectors][kSets];          // all bits set: the lane needs word 1

  PhiloxLanes(const Problem& p, const Block& block) {
    PhiloxHead head = head_of(p, block, 0);
    int64_t latest = block.h;
    for (int64_t n = 0; n < kVectors; ++n) {
      for (int set = 0; set < kSets; ++set) {
        const Words lane = iota<uint64_t>() * kSets + static_cast<uint64_t>(n * kLanes<Real> + set);
        Words row = lane + uint64_t{head.row + philox_counter(row_of(p, block, 0))};
        if constexpr (kPaired) {
          key[0][set] = broadcast(uint64_t{head.key});
        } else {
          for (int c = 0; c < kLanes<uint64_t>; ++c) {
            const auto at = static_cast<int64_t>(lane[c]);
            const uint32_t i = row_of(p, block, at);
            if (block.head(at) != latest) head = head_of(p, block, at);
            latest = block.head(at);
            row[c] = head.row + philox_counter(i);
            key[n][set][c] = head.key;
            is_second[n][set][c] = uint64_t{0} - (i / 8 % 2);
          }
        }
        product[n][set] = multiply_words(row, kPhiloxMultiplier);
      }
    }
  }

  // Words of the counters of vector n with keys of counter `column`.
  TK_INLINE_METHOD void words(int64_t n, uint32_t column, Words (&x)[kSets][2]) const {
#pragma GCC unroll 2
    for (int set = 0; set < kSets; ++set) {
      Words round_key = key[kPaired ? 0 : n][set], latest = product[n][set];
      x[set][1] = broadcast(uint64_t{column});
#pragma GCC unroll 7
      for (int round = 0; round < kPhiloxRounds; ++round) {
        if (round > 0) {
          latest = multiply_words(x[set][0], kPhiloxMultiplier);
          round_key += uint64_t{kPhiloxKeyStep};
        }
        x[set][0] = (latest >> 32) ^ round_key ^ x[set][1];
        x[set][1] = latest;
      }
      if (!kPaired) x[set][0] ^= (x[set][0] ^ x[set][1]) & is_second[n][set];
    }
  }

 private:
  static uint32_t row_of(const Problem& p, const Block& block, int64_t lane) {
    return static_cast<uint32_t>(p.dropout.first_row + block.query(lane));
  }
  static PhiloxHead head_of(const Problem& p, const Block& block, int64_t lane) {
    return philox_head(p.dropout.seed, static_cast<uint32_t>(p.dropout.first_batch + block.b),
                       static_cast<uint32_t>(p.dropout.first_head + block.head(lane)));
  }
};

// For each key r of a tile of keys x kQueries: bit `lane` of keep[r] is set if the weight is kept.
template <typename Real, int64_t kQueries>
void dropout_bits(const Problem& p, const Block& block, uint64_t* keep) {
  constexpr bool kPaired = kQueries > kPhiloxBlock;  // smaller tiles may have several heads
  static_assert(kQueries <= 64 && (!kPaired || kQueries % (2 * kLanes<Real>) == 0));
  using Lanes = PhiloxLanes<Real, kPaired, kQueries>;
  using Bits = std::conditional_t<sizeof(Real) == 4, uint32_t, uint64_t>;
  constexpr int64_t W = kLanes<Real>;
  // 16-bit random numbers are compared in the upper half of 32 bits.
  const Vec<Bits> threshold = broadcast<Bits>(keep_threshold(p.score.dropout_p) << 16);
  const Lanes lanes(p, block);
  const auto first = static_cast<uint32_t>(p.dropout.first_column + block.key(0));
  for (int64_t r = 0; r < block.keys; r += r % 8 == 7 ? 9 : 1) {  // r + 8 shares the counter of r
    const uint32_t column = philox_counter(first + static_cast<uint32_t>(r));
    for (int64_t n = 0; n < Lanes::kVectors; ++n) {
      Words x[Lanes::kSets][2];
      lanes.words(n, column, x);
#pragma GCC unroll 2
      for (int word = 0; word < (kPaired ? 2 : 1); ++word) {
        Words words = x[0][word] & 0xffffffffu;
        if constexpr (Lanes::kSets == 2) words |= x[Lanes::kSets - 1][word] << 32;
        const Vec<Bits> upper = reinterpret_cast<Vec<Bits>>(words);
        const Vec<Bits> lower = (upper << 16) & Bits{0xffffffffu};
        const uint64_t bits[] = {at_least<Bits>(lower, threshold),
                                 at_least<Bits>(upper, threshold)};
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          uint64_t& to = keep[r + 8 * half];
          if constexpr (kPaired) {
            set_paired_bits<Real>(to, n * W, word, bits[half]);
          } else {
            set_lane_bits<Real>(to, n * W, bits[half]);
          }
        }
      }
    }
  }
}

}  // namespace tk::cpu::TK_ISA
