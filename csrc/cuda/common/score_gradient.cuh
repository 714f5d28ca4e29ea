// Gradients of one tile of scores, and the preprocess kernel that computes delta for each row.
// docs/attention.md, section 3.
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
  float* lse;          // params.lse, but +inf for fully masked rows, so that their weights are 0
  float* delta;        // same layout as lse
  float* dq_sums;      // (query tiles, block_m * width), in the order of the threads' registers
  int* dq_semaphore;   // (query tiles): key blocks already added to dq; null if in any order
  int* block_counter;  // CTAs started so far
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

constexpr int kTermWarps = 4;  // warps per CTA of the preprocess kernel, one row each

// rowsum(do o) of a row of both, summed by kLanes adjacent lanes that all call it. Without 16-byte
// alignment the elements are loaded one by one.
template <int kLanes, typename Element>
TK_DEVICE float row_product(const Rows<const Element>& o, const Rows<const Element>& d_o, int i,
                            bool exists) {
  constexpr int kChunk = 16 / sizeof(Element);
  const int lane = lane_index() % kLanes;
  float sum = 0.0f;
  if (exists && o.in_chunks && d_o.in_chunks) {
    for (int c = lane * kChunk; c < o.width; c += kLanes * kChunk) {
      const uint4 chunks[2] = {*reinterpret_cast<const uint4*>(o.at(i) + c),
                               *reinterpret_cast<const uint4*>(d_o.at(i) + c)};
      const auto* const x = reinterpret_cast<const Element*>(chunks);
#pragma unroll
      for (int n = 0; n < kChunk; ++n) sum += to_float(x[n]) * to_float(x[kChunk + n]);
    }
  } else if (exists) {
    for (int c = lane; c < o.width; c += kLanes) {
      sum += to_float(o.at(i)[c]) * to_float(d_o.at(i)[c]);
    }
  }
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  return sum;
}

// rowsum(do o) - dlse of query i, computed by a warp. `at` is the query's offset in dlse.
template <typename Element>
TK_DEVICE float delta_of(const BackwardParams& p, const Sequence& seq, int h, int i, int64_t at) {
  const auto o = rows_of<const Element>(p.o, seq.at, h, seq.first_q, p.D_v);
  const auto d_o = rows_of<const Element>(p.d_o, seq.at, h, seq.first_q, p.D_v);
  const float sum = row_product<kWarp>(o, d_o, i, true);
  return p.dlse ? sum - static_cast<const float*>(p.dlse)[at] : sum;
}

// Writes lse and delta of every row.
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
    const BackwardParams& p = a.params;
    // Evaluated here: with a.score, ptxas spills more registers on sm_80.
    const bool plain = has_plain_scores(p.score, sizeof(Element));
    const float natural = plain ? static_cast<float>(p.score.scale) : 1.0f;
    const float factor = a.dropout.factor;
    uint64_t kept_bits = 0;
    if (a.dropout.seed) kept_bits = DropoutMask<kM, kN>(a.dropout, seq.b, h, i0, j0).bits;
    const DropoutMask<kM, kN> kept{kept_bits};
    for_each_element<kM, kN>([&](int m, int n, int e) {
      float& x = dp.x[m][n][e];
      if (a.dropout.seed) x = kept(m, n, e) ? x * factor : 0.0f;
      x -= rows.delta[m][e / 2];
    });
    if (!plain) {
      const Scores scores = scores_of(a, seq, h);
      const auto differentiate = [&](int row, int column, float& product, float& gradient) {
        const Score one = score(scores, product, i0 + row, j0 + column);
        product = one.value;
        if (kOf == GradientsOf::kProducts) gradient *= one.derivative;
      };
      for_each_in_memory(differentiate, s, dp);
    }
    if (!full) apply_mask(s, p, seq, h, i0, j0);
    const auto finish = [&](const auto& exponent) {
      for_each_element<kM, kN>([&](int m, int n, int e) {
        float& x = s.x[m][n][e];
        const bool hidden = !full && x == -INFINITY;
        x = exp2_approx(exponent(x, rows.lse[m][e / 2]));
        dp.x[m][n][e] = hidden ? 0.0f : x * dp.x[m][n][e];
        if (a.dropout.seed) x = kept(m, n, e) ? x * factor : 0.0f;
      });
    };
    if (sizeof(Element) == 4 || rows.large()) {
      finish([&](float x, float lse) { return minus_lse(x, natural, lse) * kLog2E; });
    } else {
      const float unit = natural * kLog2E;
      finish([&](float x, float lse) { return fmaf(x, unit, -lse * kLog2E); });
    }
  }
};

}  // namespace tk::cuda
