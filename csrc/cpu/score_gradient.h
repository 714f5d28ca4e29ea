// What every part of the backward pass needs: packed operands, and the gradient of one tile of
// scores, recomputed from q, k and lse.
//
//   p = exp(s - lse),  z = dropout's factor,  dp = do v^T
//   ds = p (z dp - delta + dlse),  delta = rowsum(do o)
//
// Symbols and derivation: docs/attention.md.
#pragma once

#include "arena.h"
#include "gemm.h"
#include "scores.h"
#include "workers.h"

namespace tk::cpu::TK_ISA {

template <typename Real>
struct BackwardWorkspace {
  int64_t width, width_v, key_blocks, query_blocks, splits;
  Real* q_rows;     // (B, H_q, query_blocks, kBlock, width)
  Real* do_rows;    // (B, H_q, query_blocks, kBlock, width_v)
  Real* delta;      // (B, H_q, query_blocks, kBlock): delta - dlse
  Real* k_rows;     // (B, H_kv, key_blocks, kBlock, width)
  Real* k_columns;  // (B, H_kv, key_blocks, width, kBlock)
  Real* v_columns;  // (B, H_kv, key_blocks, width_v, kBlock)
  Real* dq;         // (splits, B, H_q, query_blocks, kBlock, width)
  Real* rows;       // (workers, kBlock, max(width, width_v)), scratch for packing
  Real* p;          // (workers, kBlock, kBlock)
  Real* ds;         // (workers, kBlock, kBlock)
  Real* factor;     // (workers, kBlock, kBlock), with dropout
  Real* slope;      // (workers, kBlock, kBlock), with softcap
  Real* dk;         // (workers, kBlock, width)
  Real* dv;         // (workers, kBlock, width_v)
};

// Keys are split so that few heads still use every worker; each split has a dq of its own.
TK_INLINE int64_t choose_splits(const BackwardParams& p, int64_t workers, int64_t key_blocks) {
  constexpr int64_t kItemsPerWorker = 4;  // enough for the last one to finish near the others
  const int64_t heads = p.B * p.H_kv;
  if (heads == 0 || workers == 1 || heads >= workers * kItemsPerWorker) return 1;
  const int64_t wanted = (workers * kItemsPerWorker + heads - 1) / heads;
  return wanted < key_blocks ? wanted : (key_blocks > 0 ? key_blocks : 1);
}

template <typename Real>
BackwardWorkspace<Real> lay_out_backward(const BackwardParams& p, int64_t workers, Arena& arena) {
  BackwardWorkspace<Real> w;
  w.width = padded_width<Real>(p.D);
  w.width_v = padded_width<Real>(p.D_v);
  w.key_blocks = round_up(p.N, kBlock) / kBlock;
  w.query_blocks = round_up(p.M, kBlock) / kBlock;
  w.splits = choose_splits(p, workers, w.key_blocks);
  const int64_t queries = p.B * p.H_q * w.query_blocks * kBlock;
  const int64_t keys = p.B * p.H_kv * w.key_blocks * kBlock;
  const int64_t tile = workers * kBlock * kBlock;
  w.q_rows = take<Real>(arena, queries * w.width);
  w.do_rows = take<Real>(arena, queries * w.width_v);
  w.delta = take<Real>(arena, queries);
  w.k_rows = take<Real>(arena, keys * w.width);
  w.k_columns = take<Real>(arena, keys * w.width);
  w.v_columns = take<Real>(arena, keys * w.width_v);
  w.dq = take<Real>(arena, w.splits * queries * w.width);
  w.rows = take<Real>(arena, workers * kBlock * (w.width > w.width_v ? w.width : w.width_v));
  w.p = take<Real>(arena, tile);
  w.ds = take<Real>(arena, tile);
  w.factor = take<Real>(arena, p.dropout.p > 0 ? tile : 0);
  w.slope = take<Real>(arena, p.score.softcap != 0 ? tile : 0);
  w.dk = take<Real>(arena, workers * kBlock * w.width);
  w.dv = take<Real>(arena, workers * kBlock * w.width_v);
  return w;
}

template <typename Real>
TK_INLINE Real* scratch_rows(const BackwardWorkspace<Real>& w, int64_t worker) {
  return w.rows + worker * kBlock * (w.width > w.width_v ? w.width : w.width_v);
}

template <typename Real>
void pack_keys_backward(const BackwardParams& p, const BackwardWorkspace<Real>& w, int64_t worker,
                        int64_t item) {
  const int64_t head = item / w.key_blocks, j0 = item % w.key_blocks * kBlock;
  const int64_t b = head / p.H_kv, h = head % p.H_kv;
  const auto used = [&](int64_t j) { return !p.key_used || p.key_used[b * p.N + j]; };
  Real* k_rows = w.k_rows + item * kBlock * w.width;
  pack_rows(Slice{p.dtype, p.k, b, h, p.N, p.D}, j0, used, k_rows);
  transpose_block(k_rows, w.width, w.k_columns + item * kBlock * w.width);
  Real* v_rows = scratch_rows(w, worker);
  pack_rows(Slice{p.dtype, p.v, b, h, p.N, p.D_v}, j0, used, v_rows);
  transpose_block(v_rows, w.width_v, w.v_columns + item * kBlock * w.width_v);
}

// Rows that see no key have lse = -inf: their q and do become zero, whatever they hold.
template <typename Real>
void pack_queries_backward(const BackwardParams& p, const BackwardWorkspace<Real>& w,
                           int64_t worker, int64_t item) {
  constexpr Real kNothing = -static_cast<Real>(__builtin_inf());
  const int64_t head = item / w.query_blocks, i0 = item % w.query_blocks * kBlock;
  const int64_t b = head / p.H_q, h = head % p.H_q;
  const Real* lse = static_cast<const Real*>(p.lse) + head * p.M;
  const Real* dlse = p.dlse ? static_cast<const Real*>(p.dlse) + head * p.M : nullptr;
  const auto sees = [&](int64_t i) { return lse[i] != kNothing; };
  Real* d_o = w.do_rows + item * kBlock * w.width_v;
  Real* o = scratch_rows(w, worker);
  pack_rows(Slice{p.dtype, p.q, b, h, p.M, p.D}, i0, sees, w.q_rows + item * kBlock * w.width);
  pack_rows(Slice{p.dtype, p.d_o, b, h, p.M, p.D_v}, i0, sees, d_o);
  pack_rows(Slice{p.dtype, p.o, b, h, p.M, p.D_v}, i0, sees, o);
  for (int64_t r = 0; r < kBlock; ++r) {
    Vec<Real> sum{};
    for (int64_t c = 0; c < w.width_v; c += kLanes<Real>) {
      sum += load(d_o + r * w.width_v + c) * load(o + r * w.width_v + c);
    }
    const bool has_dlse = dlse && i0 + r < p.M && sees(i0 + r);
    w.delta[item * kBlock + r] = horizontal_sum<Real>(sum) - (has_dlse ? dlse[i0 + r] : Real{0});
  }
}

// Leaves dropout(p) in the worker's p and the gradient of the scores, bias included, in its ds.
template <typename Real>
void score_gradient(const BackwardParams& p, const BackwardWorkspace<Real>& w, int64_t worker,
                    const Block& block) {
  constexpr Real kNothing = -static_cast<Real>(__builtin_inf());
  Real* s = w.p + worker * kBlock * kBlock;
  Real* dp = w.ds + worker * kBlock * kBlock;
  Real* factor = p.dropout.p > 0 ? w.factor + worker * kBlock * kBlock : nullptr;
  Real* slope = p.score.softcap != 0 ? w.slope + worker * kBlock * kBlock : nullptr;
  const int64_t head = block.b * p.H_q + block.h;
  const int64_t query_tile = head * w.query_blocks + block.i0 / kBlock;
  const int64_t key_tile =
      (block.b * p.H_kv + block.h / (p.H_q / p.H_kv)) * w.key_blocks + block.j0 / kBlock;

  multiply<Real>(block.rows, kBlock, p.D, {w.q_rows + query_tile * kBlock * w.width, w.width, 1},
                 w.k_columns + key_tile * kBlock * w.width, kBlock, s, kBlock, Into::kFresh);
  finish_scores<Real>(p, block, s, slope);
  multiply<Real>(block.rows, kBlock, p.D_v,
                 {w.do_rows + query_tile * kBlock * w.width_v, w.width_v, 1},
                 w.v_columns + key_tile * kBlock * w.width_v, kBlock, dp, kBlock, Into::kFresh);
  if (factor) dropout_factors<Real>(p, block, factor);

  const Real* lse = static_cast<const Real*>(p.lse) + head * p.M + block.i0;
  const Real* delta = w.delta + query_tile * kBlock;
  for (int64_t r = 0; r < block.rows; ++r, s += kBlock, dp += kBlock) {
    // In a row that sees nothing every score is -inf; any finite number makes its p zero.
    const Real row_lse = lse[r] == kNothing ? Real{0} : lse[r];
    for_each_vector(s, [&](Vec<Real> x, int64_t c) {
      const Vec<Real> weight = exp_of_nonpositive<Real>(x - row_lse);
      const Vec<Real> z = factor ? load(factor + r * kBlock + c) : broadcast(Real{1});
      store(dp + c, weight * (z * load(dp + c) - delta[r]));
      return weight * z;
    });
  }
}

}  // namespace tk::cpu::TK_ISA
