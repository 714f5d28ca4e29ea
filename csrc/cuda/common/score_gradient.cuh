// The backward pass of one tile, and what each row brings into it. docs/attention.md, section 3.
//
//   p  = exp(s - lse), 0 where hidden
//   dp = z (do v)
//   ds = p (dp - delta),   delta = rowsum(do o) - dlse
//   da = ds (1 - tanh^2),  with a softcap
#pragma once

#include "cuda/common/dropout.cuh"
#include "cuda/common/masks.cuh"
#include "cuda/common/scores.cuh"

namespace tk::cuda {

struct BackwardArguments : Arguments<BackwardParams> {
  float* lse;      // as params.lse, but +inf for rows that see nothing, so that their weights are 0
  float* delta;    // laid out as lse
  float* dq_sums;  // a tile of block_m x width for each block of queries, as its threads hold it
  int* turns;      // for each of those, how many key blocks have added; null: in any order
  int* begun;      // how many blocks have begun
};

// The number of a block, the same for all its threads; in the order in which blocks begin where
// that is counted.
TK_DEVICE int program_of(int* begun, unsigned char* memory) {
  if (!begun) return static_cast<int>(blockIdx.x);
  int* const shared = reinterpret_cast<int*>(memory);
  if (threadIdx.x == 0) *shared = atomicAdd(begun, 1);
  __syncthreads();
  const int program = *shared;
  __syncthreads();  // everybody has read the number
  return program;
}

constexpr int kTermWarps = 4;  // of a block; a row each

// rowsum(do o) - dlse of query i, by a warp; `at` is where its statistics are.
template <typename Element>
TK_DEVICE float delta_of(const BackwardParams& p, const Sequence& seq, int h, int i, int64_t at) {
  const auto o = rows_of<const Element>(p.o, seq.at, h, seq.first_q, p.D_v);
  const auto d_o = rows_of<const Element>(p.d_o, seq.at, h, seq.first_q, p.D_v);
  float sum = 0.0f;
  for (int c = lane_index(); c < o.width; c += kWarp) {
    sum += to_float(o.at(i)[c]) * to_float(d_o.at(i)[c]);
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  return p.dlse ? sum - static_cast<const float*>(p.dlse)[at] : sum;
}

// lse and delta of every row.
template <typename Element>
TK_KERNEL(kTermWarps* kWarp, 1)
backward_preprocess_kernel(const __grid_constant__ BackwardArguments a) {
  const BackwardParams& p = a.params;
  const int program = static_cast<int>(blockIdx.x), H_q = static_cast<int>(p.H_q);
  const int h = program / a.blocks % H_q;
  const Sequence seq = sequence_of(a, program / a.blocks / H_q);
  const int i = program % a.blocks * kTermWarps + warp_index();
  if (i >= seq.M) return;
  const int64_t at = statistics_offset(p, seq, h) + i;
  const float delta = delta_of<Element>(p, seq, h, i, at);
  if (lane_index() != 0) return;
  const float lse = static_cast<const float*>(p.lse)[at];
  a.lse[at] = lse == -INFINITY ? INFINITY : lse;
  a.delta[at] = delta;
}

// Queries that are there and, unless `lse` is null, see something. The others may be NaN.
struct UsedQueries {
  int M;
  const float* lse;

  TK_DEVICE_METHOD bool operator()(int i) const { return i < M && (!lse || lse[i] < INFINITY); }
};

template <typename Element>
TK_DEVICE float recomputed_weight(float s, float lse, float unit) {
  if constexpr (sizeof(Element) == 2) {
    return exp2_approx(fmaf(s, unit, -lse * kLog2E));
  } else {
    return exp2_approx((s - lse) * unit);
  }
}

// lse and delta of a lane's rows of an accumulator.
template <int kM>
struct RowTerms {
  float lse[kM][2], delta[kM][2];

  TK_DEVICE_METHOD void load(const float* all_lse, const float* all_delta, int i0, int M) {
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const int i = i0 + 8 * r + lane_index() / 4;
      lse[r / 2][r % 2] = i < M ? all_lse[i] : INFINITY;
      delta[r / 2][r % 2] = i < M ? all_delta[i] : 0.0f;
    }
  }
};

// With a softcap the gradients of scores, which a bias gets, are not those of products.
enum class GradientsOf { kProducts, kScores };

// A tile's place, and all that its gradients depend on beside products.
template <typename Element, int kM>
struct TileGradients {
  const BackwardArguments& a;
  const Sequence& seq;
  int h, i0, j0;  // of the accumulators' first element
  bool full;
  RowTerms<kM> terms;

  // Products and do v become z p, and da or ds.
  template <GradientsOf kOf, int kN>
  TK_DEVICE_METHOD void apply(Accumulator<kM, kN>& s, Accumulator<kM, kN>& dp) const {
    const BackwardParams& p = a.params;
    const bool plain = has_plain_scores<Element>(p.score);
    const float unit = plain ? static_cast<float>(p.score.scale) * kLog2E : kLog2E;
    const float factor = a.dropout.factor;
    uint64_t kept_bits = 0;
    if (a.dropout.seed) kept_bits = Kept<kM, kN>(a.dropout, seq.b, h, i0, j0).bits;
    const Kept<kM, kN> kept{kept_bits};
    for_each_element<kM, kN>([&](int m, int n, int e) {
      float& x = dp.x[m][n][e];
      if (a.dropout.seed) x = kept(m, n, e) ? x * factor : 0.0f;
      x -= terms.delta[m][e / 2];
    });
    if (!plain) {
      const Scores scores = scores_of(p, seq, h);
      const auto differentiate = [&](int row, int column, float& product, float& gradient) {
        const Score one = score(scores, product, i0 + row, j0 + column);
        product = one.value;
        if (kOf == GradientsOf::kProducts) gradient *= one.derivative;
      };
      for_each_in_memory(differentiate, s, dp);
    }
    if (!full) apply_mask(s, p, seq, h, i0, j0);
    for_each_element<kM, kN>([&](int m, int n, int e) {
      float& x = s.x[m][n][e];
      const bool hidden = !full && x == -INFINITY;
      x = recomputed_weight<Element>(x, terms.lse[m][e / 2], unit);
      dp.x[m][n][e] = hidden ? 0.0f : x * dp.x[m][n][e];
      if (a.dropout.seed) x = kept(m, n, e) ? x * factor : 0.0f;
    });
  }
};

}  // namespace tk::cuda
