// Gradient of one tile of scores, recomputed from q, k and lse. Tiles are transposed, as in the
// forward pass.
//
//   p = exp(s - lse),  z = dropout factor,  dp = v do^T
//   ds = p (z dp - delta + dlse),  delta = rowsum(do o)
//
// In full precision the scaled score is rounded before lse is subtracted, as in the forward pass:
// differences of large numbers are then exact, and 0 for a score that is much larger than the
// others of its row. In half precision one fused operation per score computes the exponent in base
// 2, which saves two instructions, unless lse is so large that its rounding would show. Elsewhere
// the rounding error of lse is subtracted too.
//
// Symbols and derivation: docs/attention.md.
#pragma once

#include "cpu/attention/backward_workspace.h"
#include "cpu/attention/dropout.h"

namespace tk::cpu::TK_ISA {

// Exponents of a tile's weights, s - lse in base 2.
template <typename Engine>
struct WeightExponents {
  using Real = typename Engine::Real;
  static constexpr bool kFused = Engine::kPrecision == Precision::kHalf;
  static constexpr Real kLargest = 1024;  // of |lse|: the weight's relative error is below 2^-13
  static constexpr Real kInfinity = static_cast<Real>(__builtin_inf());  // of rows without weights
  static constexpr Real kLog2E = static_cast<Real>(1.4426950408889634);
  const Real *lse, *lse_rest;  // (kBlock)
  ScoreUnit<Real> unit;
  bool subtracts;  // lse, from a pass of scores

  WeightExponents(const BackwardParams& p, const Real* lse, const Real* lse_rest, int64_t queries)
      : lse(lse), lse_rest(lse_rest), unit(score_unit<Real>(p)), subtracts(false) {
    for (int64_t lane = 0; kFused && lane < queries; lane += kLanes<Real>) {
      const Vec<Real> x = load(lse + lane);
      subtracts |= any<Real>(((x > kLargest) & (x < kInfinity)) | (x < -kLargest));
    }
  }

  // For the scores s (keys x kPass) of queries from `lane` on.
  void begin_pass(int64_t keys, int64_t lane, Real* s) const {
    for (int64_t r = 0; subtracts && r < keys; ++r, s += Engine::kPass) {
      for_each_vector(s, Engine::kPass, [&](Vec<Real> x, int64_t c) {
        return rounded<Real>(x * unit.natural) - load(lse + lane + c) - load(lse_rest + lane + c);
      });
    }
  }
  // What `exponent` subtracts for one vector of queries: from natural logarithms, and in base 2.
  struct Base {
    Vec<Real> natural, log2;
  };
  TK_INLINE_METHOD Base base(int64_t lane) const {
    if (!kFused) return {load(lse + lane), load(lse_rest + lane) * kLog2E};
    return {Vec<Real>{}, subtracts ? Vec<Real>{} : load(lse + lane) * kLog2E};
  }
  TK_INLINE_METHOD Vec<Real> exponent(Vec<Real> s, const Base& base) const {
    if (!kFused) return (rounded<Real>(s * unit.natural) - base.natural) * kLog2E - base.log2;
    return s * (subtracts ? kLog2E : unit.log2) - base.log2;
  }
};

// Computes one pass (keys x kPass, queries from `lane` on): scores to t.s, dp to t.dp, dropout bits
// to t.keep.
template <typename Engine>
void multiply_pass(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                   const BackwardScratch<Engine>& t, int64_t slot, int64_t key_block,
                   int64_t query_block, const Block& block, int64_t lane) {
  using Real = typename Engine::Real;
  using Product = typename Engine::Product;
  constexpr int64_t kPass = Engine::kPass;
  const Product scores{Engine::left(w.k, w.k_panel(slot, key_block), block.first),
                       Engine::right_t(w.q, w.q_panel(slot, query_block), lane), p.D};
  const int64_t queries = block.computed_queries();
  // Every pass reads k and v; they stay in L1 between passes only if both are small.
  constexpr int64_t kSmall = 16 << 10;
  const int64_t bytes = block.keys * (w.k.width + w.v.width) * Engine::kElementBytes;
  const LoadPolicy policy = bytes <= kSmall ? LoadPolicy::kCached : LoadPolicy::kStreamed;
  Engine::template multiply<Accuracy::kFull>(block.keys, queries, &scores, 1, t.s, kPass,
                                             WriteMode::kOverwrite, policy);
  if (w.distances) {
    add_relative_keys<Engine, kPass>(w.distances, w.q, w.q_panel(slot, query_block), lane, p.D,
                                     block, t.bands_of(query_block, lane), t.s);
  }
  finish_scores<Real, kPass>(p, block, t.s, is_capped(p) ? t.slope : nullptr);
  const Product dp{Engine::left(w.v, w.v_panel(slot, key_block), block.first),
                   Engine::right_t(w.d_o, w.do_panel(slot, query_block), lane), p.D_v};
  Engine::template multiply<Accuracy::kFull>(block.keys, queries, &dp, 1, t.dp, kPass,
                                             WriteMode::kOverwrite, policy);
  if (p.score.dropout_p > 0) dropout_bits<Real, kPass>(p, block, t.keep);
}

// visit(r, lane, weight, ds) for rows r and r + 16 of a tile of keys x queries, two vectors each.
// weight is p after dropout, without its scale; ds is the gradient of the scores including the
// bias, before the derivative of a cap. Scores and dp are computed for kPass queries at a time, to
// stay in L1.
template <typename Engine, typename Visit>
void score_gradient(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                    const BackwardScratch<Engine>& t, int64_t slot, int64_t key_block,
                    int64_t query_block, const Block& block, Visit&& visit) {
  using Real = typename Engine::Real;
  constexpr int64_t W = kLanes<Real>, kPass = Engine::kPass;
  const int64_t query_item = w.query_index(slot, query_block);
  const int64_t row0 = query_item * kBlock;
  const WeightExponents<Engine> exponents(p, w.lse + row0, w.lse_rest + row0,
                                          block.computed_queries());
  const Real kept = keep_factor<Real>(p);
  const uint64_t* keep = p.score.dropout_p > 0 ? t.keep : nullptr;
  BiasPrefetch bias;
  int64_t step = 0;
  for (int64_t lane = 0; lane < block.computed_queries(); lane += 2 * W) {
    typename WeightExponents<Engine>::Base base[2];
    Vec<Real> delta[2];
    for (int n = 0; n < 2; ++n) {
      base[n] = exponents.base(lane + n * W);
      delta[n] = load(w.delta + row0 + lane + n * W);
    }
    const int64_t within = lane % kPass;
    if (within == 0) {
      Block pass = block;
      pass.i0 += lane;
      pass.queries = std::min(block.queries - lane, kPass);
      multiply_pass(p, w, t, slot, key_block, query_block, pass, lane);
      exponents.begin_pass(block.keys, lane, t.s);
      bias = next_bias(p, pass);
      step = 0;
    }
    for (int64_t group = 0; group < block.keys; group += kKeyGroup) {
      for (int64_t row = group; row < group + kKeyGroup / 2; ++row) {
        bias.prefetch_row(step++);
        Vec<Real> weight[2][2], ds[2][2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 2
          for (int n = 0; n < 2; ++n) {
            const int64_t r = row + half * kKeyGroup / 2, column = within + n * W;
            const int64_t at = r * kPass + column;
            const Vec<Real> power = exponents.exponent(load(t.s + at), base[n]);
            weight[half][n] = exp2<Real, Engine::kPrecision>(power);
            Vec<Real> dp_kept = load(t.dp + at);
            const Vec<Real> p_all = weight[half][n];
            if (keep) {
              const uint64_t bits = lane_bits<Real>(keep[r], column);
              dp_kept = kept * mask_lanes<Real>(bits, dp_kept);
              weight[half][n] = mask_lanes<Real>(bits, p_all);
            }
            ds[half][n] = p_all * (dp_kept - delta[n]);
          }
        }
        visit(row, lane, weight, ds);
      }
    }
  }
}

}  // namespace tk::cpu::TK_ISA
