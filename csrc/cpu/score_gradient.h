// What every part of the backward pass needs: packed operands, and the gradient of one tile of
// scores, recomputed from q, k and lse. Tiles are transposed, as in the forward pass.
//
//   p = exp(s - lse),  z = dropout's factor,  dp = v do^T
//   ds = p (z dp - delta + dlse),  delta = rowsum(do o)
//
// Symbols and derivation: docs/attention.md.
#pragma once

#include <cmath>

#include "arena.h"
#include "dropout.h"
#include "scores.h"
#include "workers.h"

namespace tk::cpu::TK_ISA {

template <typename Engine>
struct BackwardWorkspace {
  using Real = typename Engine::Real;
  PanelLayout k, v, q, d_o;
  int64_t key_blocks, query_blocks, splits;
  char* k_panels;   // (B, H_kv, key_blocks)
  char* v_panels;   // (B, H_kv, key_blocks)
  char* q_panels;   // (B, H_q, query_blocks)
  char* do_panels;  // (B, H_q, query_blocks)
  Real* lse;        // (B, H_q, query_blocks, 2, kBlock): in powers of two, and what was rounded
                    // away; 0 for rows without one
  Real* delta;      // (B, H_q, query_blocks, kBlock): delta - dlse
  Real* dq;         // (splits, B, H_q, query_blocks, D, kBlock)
  char* scratch;    // (workers), see BackwardScratch
  size_t scratch_bytes;
  bool* finite;
};

// One worker's, small enough to stay in its cache.
template <typename Engine>
struct BackwardScratch {
  using Real = typename Engine::Real;
  using Weights = typename Engine::template Tile<kLeft, kBlock, kBlock>;
  using Gradient = typename Engine::template Tile<kLeft | kRight, kBlock, kBlock>;
  Real* s;         // (kBlock, kBlock)
  Real* dp;        // (kBlock, kBlock)
  char* weights;   // of Weights
  char* gradient;  // of Gradient
  Real* dk;        // (kBlock, D)
  Real* dv;        // (kBlock, D_v)
  uint64_t* keep;  // (kBlock), with dropout
  Real* ds;        // (kBlock, kBlock), with the bias's gradient
  Real* slope;     // (kBlock, kBlock), with softcap
  Real* rows;      // (kBlock, D or D_v), for packing
  Real* o_rows;    // (kBlock, D_v), for delta
};

template <typename Engine>
BackwardScratch<Engine> lay_out_scratch(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                                        Arena& arena) {
  using Real = typename Engine::Real;
  using Scratch = BackwardScratch<Engine>;
  constexpr int64_t kTileSize = kBlock * kBlock;
  Scratch t;
  t.s = take<Real>(arena, kTileSize);
  t.dp = take<Real>(arena, kTileSize);
  t.weights = take<char>(arena, static_cast<int64_t>(Scratch::Weights::kBytes));
  t.gradient = take<char>(arena, static_cast<int64_t>(Scratch::Gradient::kBytes));
  t.dk = take<Real>(arena, kBlock * w.k.width);
  t.dv = take<Real>(arena, kBlock * w.v.width);
  t.ds = take<Real>(arena, p.dbias.data ? kTileSize : 0);
  t.keep = take<uint64_t>(arena, p.dropout.p > 0 ? kBlock : 0);
  t.slope = take<Real>(arena, p.score.softcap != 0 ? kTileSize : 0);
  t.rows = take<Real>(arena, kBlock * (w.k.width > w.v.width ? w.k.width : w.v.width));
  t.o_rows = take<Real>(arena, kBlock * w.v.width);
  return t;
}

// Keys are split so that few heads still use every worker; each split has a dq of its own.
TK_INLINE int64_t choose_splits(const BackwardParams& p, int64_t workers, int64_t key_blocks) {
  constexpr int64_t kItemsPerWorker = 4;  // enough for the last one to finish near the others
  const int64_t heads = p.B * p.H_kv;
  if (heads == 0 || workers == 1 || heads >= workers * kItemsPerWorker) return 1;
  const int64_t wanted = (workers * kItemsPerWorker + heads - 1) / heads;
  return wanted < key_blocks ? wanted : (key_blocks > 0 ? key_blocks : 1);
}

template <typename Engine>
BackwardWorkspace<Engine> lay_out_backward(const BackwardParams& p, int64_t workers, Arena& arena) {
  using Real = typename Engine::Real;
  BackwardWorkspace<Engine> w;
  w.k = Engine::layout(kLeft | kLeftT, kBlock, p.D);
  w.v = Engine::layout(kLeft, kBlock, p.D_v);
  w.q = Engine::layout(kRight | kRightT, kBlock, p.D);
  w.d_o = Engine::layout(kRight | kRightT, kBlock, p.D_v);
  w.key_blocks = round_up(p.N, kBlock) / kBlock;
  w.query_blocks = round_up(p.M, kBlock) / kBlock;
  w.splits = choose_splits(p, workers, w.key_blocks);
  const int64_t queries = p.B * p.H_q * w.query_blocks, keys = p.B * p.H_kv * w.key_blocks;
  w.k_panels = take<char>(arena, keys * static_cast<int64_t>(w.k.bytes));
  w.v_panels = take<char>(arena, keys * static_cast<int64_t>(w.v.bytes));
  w.q_panels = take<char>(arena, queries * static_cast<int64_t>(w.q.bytes));
  w.do_panels = take<char>(arena, queries * static_cast<int64_t>(w.d_o.bytes));
  w.lse = take<Real>(arena, queries * 2 * kBlock);
  w.delta = take<Real>(arena, queries * kBlock);
  w.dq = take<Real>(arena, w.splits * queries * kBlock * w.k.width);
  Arena one;
  lay_out_scratch(p, w, one);
  w.scratch_bytes = one.used;
  w.scratch = take<char>(arena, workers * static_cast<int64_t>(one.used));
  w.finite = take<bool>(arena, 1);
  return w;
}

template <typename Engine>
BackwardScratch<Engine> scratch_of(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                                   int64_t worker) {
  Arena arena{w.scratch + static_cast<size_t>(worker) * w.scratch_bytes};
  return lay_out_scratch(p, w, arena);
}

template <typename Engine>
void pack_keys_backward(const BackwardParams& p, const BackwardWorkspace<Engine>& w, int64_t worker,
                        int64_t item) {
  const int64_t head = item / w.key_blocks, j0 = item % w.key_blocks * kBlock;
  const int64_t b = head / p.H_kv, h = head % p.H_kv;
  const auto used = [&](int64_t j) { return !p.key_used || p.key_used[b * p.N + j]; };
  auto* rows = scratch_of(p, w, worker).rows;
  pack_panel<Engine>(w.k, Slice{p.dtype, p.k, b, h, p.N, p.D}, j0, used, rows,
                     w.k_panels + static_cast<size_t>(item) * w.k.bytes, w.finite);
  pack_panel<Engine>(w.v, Slice{p.dtype, p.v, b, h, p.N, p.D_v}, j0, used, rows,
                     w.v_panels + static_cast<size_t>(item) * w.v.bytes, w.finite);
}

// sums[r] = a_r b_r, of kBlock rows of `width`.
template <typename Real>
void row_sums(const Real* a, const Real* b, int64_t width, Real* sums) {
  constexpr int64_t W = kLanes<Real>;
  for (int64_t r0 = 0; r0 < kBlock; r0 += W) {
    Vec<Real> square[W] = {}, sum{};
    for (int64_t r = 0; r < W; ++r) {
      for (int64_t c = 0; c < width; c += W) {
        square[r] += load(a + (r0 + r) * width + c) * load(b + (r0 + r) * width + c);
      }
    }
    transpose<Real>(square);
    for (int64_t c = 0; c < W; ++c) sum += square[c];
    store(sums + r0, sum);
  }
}

// to[0] + to[kBlock] = lse in powers of two: large scores leave no digits for its fraction.
template <typename Real>
TK_INLINE void lse_to_log2(Real lse, Real* to) {
  constexpr Real kLog2E = static_cast<Real>(1.4426950408889634);
  constexpr Real kRest = static_cast<Real>(sizeof(Real) == 4 ? 1.925963033e-8 : 2.03552737409e-17);
  to[0] = lse * kLog2E;
  to[kBlock] = std::fma(lse, kLog2E, -to[0]) + lse * kRest;
}

// Rows that see no key have lse = -inf: their q and do become zero, whatever they hold.
template <typename Engine>
void pack_queries_backward(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                           int64_t worker, int64_t item) {
  using Real = typename Engine::Real;
  constexpr Real kNothing = -static_cast<Real>(__builtin_inf());
  const int64_t head = item / w.query_blocks, i0 = item % w.query_blocks * kBlock;
  const int64_t b = head / p.H_q, h = head % p.H_q;
  const Real* lse = static_cast<const Real*>(p.lse) + head * p.M;
  const Real* dlse = p.dlse ? static_cast<const Real*>(p.dlse) + head * p.M : nullptr;
  const auto sees = [&](int64_t i) { return lse[i] != kNothing; };
  const BackwardScratch<Engine> t = scratch_of(p, w, worker);
  pack_panel<Engine>(w.q, Slice{p.dtype, p.q, b, h, p.M, p.D}, i0, sees, t.rows,
                     w.q_panels + static_cast<size_t>(item) * w.q.bytes, w.finite);
  const Slice o{p.dtype, p.o, b, h, p.M, p.D_v}, d_o{p.dtype, p.d_o, b, h, p.M, p.D_v};
  pack_panel<Engine>(w.d_o, d_o, i0, sees, t.rows,
                     w.do_panels + static_cast<size_t>(item) * w.d_o.bytes, w.finite);
  unpack_rows(d_o, i0, kBlock, w.d_o.width, sees, t.rows);
  unpack_rows(o, i0, kBlock, w.d_o.width, sees, t.o_rows);
  row_sums(t.rows, t.o_rows, w.d_o.width, w.delta + item * kBlock);
  for (int64_t r = 0; r < kBlock; ++r) {
    const bool known = i0 + r < p.M && sees(i0 + r);
    if (dlse && known) w.delta[item * kBlock + r] -= dlse[i0 + r];
    // In a row that sees nothing every score is -inf; any finite number makes its p zero.
    lse_to_log2(known ? lse[i0 + r] : Real{0}, w.lse + item * 2 * kBlock + r);
  }
}

// visit(r, lane, p where it is kept, ds): rows r and r + 16 of a tile of keys by queries, two
// vectors of each; ds is the gradient of the scores, bias included, before the softcap's slope.
template <typename Engine, typename Visit>
void score_gradient(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                    const BackwardScratch<Engine>& t, const Block& block, Visit&& visit) {
  using Real = typename Engine::Real;
  using Product = typename Engine::Product;
  constexpr int64_t W = kLanes<Real>;
  const int64_t query_item = (block.b * p.H_q + block.h) * w.query_blocks + block.i0 / kBlock;
  const int64_t kv_head = block.b * p.H_kv + block.h / (p.H_q / p.H_kv);
  const auto query_panel = static_cast<size_t>(query_item);
  const auto key_panel = static_cast<size_t>(kv_head * w.key_blocks + block.j0 / kBlock);

  const Product scores{Engine::left(w.k, w.k_panels + key_panel * w.k.bytes, block.first),
                       Engine::right_t(w.q, w.q_panels + query_panel * w.q.bytes), p.D};
  Engine::template multiply<Exact::kFully>(block.keys, kBlock, &scores, 1, t.s, kBlock,
                                           Into::kFresh);
  finish_scores<Real, kBlock>(p, block, t.s, p.score.softcap != 0 ? t.slope : nullptr);
  const Product dp{Engine::left(w.v, w.v_panels + key_panel * w.v.bytes, block.first),
                   Engine::right_t(w.d_o, w.do_panels + query_panel * w.d_o.bytes), p.D_v};
  Engine::template multiply<Exact::kFully>(block.keys, kBlock, &dp, 1, t.dp, kBlock, Into::kFresh);
  const uint64_t* keep = p.dropout.p > 0 ? t.keep : nullptr;
  if (keep) dropout_bits<Real, kBlock>(p, block, t.keep);
  const Real kept = keep_factor<Real>(p);

  const Real to_log2 = static_cast<Real>(score_to_log2(p));
  for (int64_t lane = 0; lane < kBlock; lane += 2 * W) {
    Vec<Real> lse[2], lse_rest[2], delta[2];
    for (int n = 0; n < 2; ++n) {
      lse[n] = load(w.lse + query_item * 2 * kBlock + lane + n * W);
      lse_rest[n] = load(w.lse + (query_item * 2 + 1) * kBlock + lane + n * W);
      delta[n] = load(w.delta + query_item * kBlock + lane + n * W);
    }
    for (int64_t group = 0; group < block.keys; group += kKeyGroup) {
      for (int64_t row = group; row < group + kKeyGroup / 2; ++row) {
        Vec<Real> weight[2][2], ds[2][2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 2
          for (int n = 0; n < 2; ++n) {
            const int64_t r = row + half * kKeyGroup / 2, column = lane + n * W;
            const int64_t at = r * kBlock + column;
            Vec<Real> power = load(t.s + at) * to_log2 - lse[n];
            if constexpr (Engine::kPrecision == Precision::kReal) power -= lse_rest[n];
            weight[half][n] = exp2<Real, Engine::kPrecision>(power);
            Vec<Real> dp_kept = load(t.dp + at);
            const Vec<Real> p_all = weight[half][n];
            if (keep) {
              dp_kept = kept * keep_bits<Real>(keep[r] >> column, dp_kept);
              weight[half][n] = keep_bits<Real>(keep[r] >> column, p_all);
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
