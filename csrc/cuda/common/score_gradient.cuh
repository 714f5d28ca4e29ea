// Gradients of one tile of scores. docs/attention.md, section 3.
//
//   p  = exp(s - lse), 0 where hidden
//   dp = z (do v)
//   ds = p (dp - delta),   delta = rowsum(do o) - dlse
//   da = ds (1 - tanh^2),  with a softcap
#pragma once

#include "cuda/common/dropout.cuh"
#include "cuda/common/masks.cuh"
#include "cuda/common/scores.cuh"
#include "cuda/common/tile_order.cuh"

namespace tk::cuda {

struct BackwardArguments : Arguments<BackwardParams> {
  float* lse;          // params.lse, but +inf for fully masked rows, so that their weights are 0
  float* delta;        // same layout as lse
  float* dq_sums;      // (query tiles, block_m * width), in the order of the threads' registers
  int* dq_semaphore;   // (query tiles): key blocks already added to dq; null if in any order
  int* block_counter;  // CTAs started so far
  int row_tiles;       // query blocks of a head: tiles_of
  TileOrder order;     // of the key blocks
  Divisor by_sharing;  // query heads per key head
  // (CTAs of the relative bias, distances of a band): ds summed by distance
  float* distance_sums;
};

// Index of the CTA, the same for all its threads. With a counter, CTAs are numbered in the order in
// which they start; null means blockIdx.
TK_DEVICE int program_of(int* block_counter, unsigned char* memory) {
  if (!block_counter) return static_cast<int>(blockIdx.x);
  int* const shared = reinterpret_cast<int*>(memory);
  if (threadIdx.x == 0) *shared = atomicAdd(block_counter, 1);
  __syncthreads();
  const int program = *shared;
  __syncthreads();  // all threads have read the index
  return program;
}

// True for queries within the sequence that are not fully masked; a null `lse` skips the second
// test. Other rows may hold NaN.
struct LiveQueries {
  int M;
  const float* lse;

  TK_DEVICE_METHOD bool operator()(int i) const { return i < M && (!lse || lse[i] < INFINITY); }
};

// True if a weight from the fused exponent unit * s - log2(e) * lse would be inaccurate. The scaled
// score is then rounded before lse is subtracted, as in the forward pass: the weight of a score
// that is much larger than the others of its row is 1. lse = +inf marks fully masked rows.
TK_DEVICE bool is_large(float lse) { return fabsf(lse) > kLargestFused && lse < INFINITY; }

// s - lse, with s = natural * product.
TK_DEVICE float minus_lse(float product, float natural, float lse) {
  return __fmul_rn(product, natural) - lse;
}

// x - rest in base 2, where x is s - lse.
TK_DEVICE float exact_exponent(float x, float rest) { return fmaf(x, kLog2E, -rest * kLog2E); }

// lse and delta of the accumulator rows that a lane holds.
template <int kM>
struct RowStatistics {
  float lse[kM][2], delta[kM][2];

  TK_DEVICE_METHOD void load(const float* all_lse, const float* all_delta, int i0, int M) {
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const int i = i0 + 8 * r + lane_index() / 4;
      lse[r / 2][r % 2] = i < M ? all_lse[i] : INFINITY;
      delta[r / 2][r % 2] = i < M ? all_delta[i] : 0.0f;
    }
  }
  TK_DEVICE_METHOD bool large() const {
    bool any = false;
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) any |= is_large(lse[r / 2][r % 2]);
    return any;
  }
};

// With a softcap the gradient of a score (the bias gradient) differs from that of its product.
enum class GradientsOf { kProducts, kScores };

// Position and row statistics of a tile of scores.
template <typename Element, int kM>
struct TileGradients {
  const BackwardArguments& a;
  const Sequence& seq;
  int h, i0, j0;  // head, query and key of the accumulators' first element
  bool full;
  RowStatistics<kM> rows;

  // Replaces s = q k^T by z p, and dp = do v^T by da or ds.
  template <GradientsOf kOf, int kN>
  TK_DEVICE_METHOD void apply(Accumulator<kM, kN>& s, Accumulator<kM, kN>& dp) const {
    const float unit = a.score.scale * kLog2E;
    const auto fused = [&](float x, int m, int half) {
      return fmaf(x, unit, -rows.lse[m][half] * kLog2E);
    };
    // Where gradients of scores are wanted, there is a bias: scores are not plain.
    constexpr bool kMayBePlain = sizeof(Element) == 2 && kOf == GradientsOf::kProducts;
    const bool is_plain = kMayBePlain && a.score.plain, is_fused = is_plain && !rows.large();
    if (is_fused && full && !a.dropout.seed) {  // most tiles, and the shortest path
      subtract_delta(dp);
      return differentiate<false>(s, dp, fused);
    }
    DropoutMask<RowsAre::kQueries, kM, kN> kept;
    if (a.dropout.seed) {
      kept.draw(a.dropout, philox_head(a.dropout, seq.b, h), i0, j0);
      drop(dp, kept);
    }
    subtract_delta(dp);
    if (!is_plain) apply_score_options<kOf>(s, dp);
    if (!full) apply_mask(s, a.params, seq, h, i0, j0);
    if (is_fused) {
      differentiate<true>(s, dp, fused);
    } else {
      const float natural = is_plain ? a.score.scale : 1.0f;
      const float* const rest =
          static_cast<const float*>(a.params.lse_rest) + statistics_offset(a.params, seq, h);
      differentiate<true>(s, dp, [&](float x, int m, int half) {
        const int i = min(i0 + 16 * m + row_of(2 * half), seq.M - 1);  // lse is inf from M on
        return exact_exponent(minus_lse(x, natural, rows.lse[m][half]), rest[i]);
      });
    }
    if (a.dropout.seed) drop(s, kept);
  }

 private:
  template <int kN>
  TK_DEVICE_METHOD void subtract_delta(Accumulator<kM, kN>& dp) const {
    for_each_element<kM, kN>([&](int m, int n, int e) { dp.x[m][n][e] -= rows.delta[m][e / 2]; });
  }

  // Replaces s by p = 2^exponent, and dp by p dp.
  template <bool kSomeHidden, int kN, typename Exponent>
  TK_DEVICE_METHOD void differentiate(Accumulator<kM, kN>& s, Accumulator<kM, kN>& dp,
                                      const Exponent& exponent) const {
    for_each_element<kM, kN>([&](int m, int n, int e) {
      float &x = s.x[m][n][e], &gradient = dp.x[m][n][e];
      const bool hidden = kSomeHidden && x == -INFINITY;
      x = exp2_approx(exponent(x, m, e / 2));
      gradient *= x;
      if (hidden) gradient = 0.0f;  // dp may be NaN
    });
  }

  template <int kN, typename Mask>
  TK_DEVICE_METHOD void drop(Accumulator<kM, kN>& x, const Mask& kept) const {
    for_each_element<kM, kN>([&](int m, int n, int e) {
      x.x[m][n][e] = kept(m, n, e) ? x.x[m][n][e] * a.dropout.factor : 0.0f;
    });
  }

  // Replaces products by scores, and multiplies dp by the derivatives of the scores.
  template <GradientsOf kOf, int kN>
  TK_DEVICE_METHOD void apply_score_options(Accumulator<kM, kN>& s, Accumulator<kM, kN>& dp) const {
    if (!a.score.has_options) return scale_products(a.score.scale, s);
    const Scores scores = scores_of(a, seq, h);
    const auto to_score = [&](int row, int column, float& product, float& gradient) {
      const Score one = score(scores, product, i0 + row, j0 + column);
      product = one.value;
      if (kOf == GradientsOf::kProducts) gradient *= one.derivative;
    };
    for_each_in_memory(to_score, s, dp);
  }
};

}  // namespace tk::cuda
