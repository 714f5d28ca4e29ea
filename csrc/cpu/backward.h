// Backward: dq, dk, dv, by blocks of keys. The scores are recomputed from lse; nothing of size
// M x N is stored.
//
//   for every block of keys, for every query head of its group, for every block of queries:
//     p, ds = score_gradient
//     dv += dropout(p)^T do,  dk += scale ds^T q,  dq += scale ds k
//
// dk and dv of a block stay in cache. Each split of the keys sums a dq of its own, and the splits
// are added in order, so gradients do not depend on which thread ran first.
#pragma once

#include "bias_gradient.h"
#include "score_gradient.h"

namespace tk::cpu::TK_ISA {

template <typename Real>
void backward_tile(const BackwardParams& p, const BackwardWorkspace<Real>& w, int64_t worker,
                   const Block& block, Real* dq) {
  score_gradient(p, w, worker, block);
  const Real* weights = w.p + worker * kBlock * kBlock;
  Real* ds = w.ds + worker * kBlock * kBlock;
  if (p.score.softcap != 0) {
    const Real* slope = w.slope + worker * kBlock * kBlock;
    for (int64_t c = 0; c < block.rows * kBlock; ++c) ds[c] *= slope[c];
  }
  const int64_t keys = p.N - block.j0 < kBlock ? p.N - block.j0 : kBlock;
  const int64_t query_tile = (block.b * p.H_q + block.h) * w.query_blocks + block.i0 / kBlock;
  const int64_t key_tile =
      (block.b * p.H_kv + block.h / (p.H_q / p.H_kv)) * w.key_blocks + block.j0 / kBlock;
  multiply<Real>(keys, w.width_v, block.rows, {weights, 1, kBlock},
                 w.do_rows + query_tile * kBlock * w.width_v, w.width_v,
                 w.dv + worker * kBlock * w.width_v, w.width_v, Into::kSum);
  multiply<Real>(keys, w.width, block.rows, {ds, 1, kBlock},
                 w.q_rows + query_tile * kBlock * w.width, w.width,
                 w.dk + worker * kBlock * w.width, w.width, Into::kSum);
  multiply<Real>(block.rows, w.width, keys, {ds, kBlock, 1}, w.k_rows + key_tile * kBlock * w.width,
                 w.width, dq, w.width, Into::kSum);
}

template <typename Real>
void write_rows(DType dtype, const Strided& to, int64_t b, int64_t h, int64_t row0, int64_t rows,
                int64_t width, int64_t padded, Real scale, Real* from) {
  for (int64_t r = 0; r < rows; ++r, from += padded) {
    for (int64_t c = 0; c < width; ++c) from[c] *= scale;
    write_row(from, width, dtype, to.data, row_offset(to, b, h, row0 + r), to.stride[3]);
  }
}

// The split's blocks of keys are every `splits`-th, so that causal work divides evenly.
template <typename Real>
void backward_split(const BackwardParams& p, const BackwardWorkspace<Real>& w, int64_t worker,
                    int64_t b, int64_t kv_head, int64_t split) {
  const int64_t group = p.H_q / p.H_kv, head_size = w.query_blocks * kBlock * w.width;
  const int64_t h0 = kv_head * group;
  Real* dq = w.dq + ((split * p.B + b) * p.H_q + h0) * head_size;
  for (int64_t c = 0; c < group * head_size; ++c) dq[c] = 0;
  Real* dk = w.dk + worker * kBlock * w.width;
  Real* dv = w.dv + worker * kBlock * w.width_v;
  for (int64_t n = split; n < w.key_blocks; n += w.splits) {
    const int64_t j0 = n * kBlock;
    for (int64_t c = 0; c < kBlock * w.width; ++c) dk[c] = 0;
    for (int64_t c = 0; c < kBlock * w.width_v; ++c) dv[c] = 0;
    for (int64_t h = h0; h < h0 + group; ++h) {
      for (int64_t m = 0; m < w.query_blocks; ++m) {
        const Block block = make_block(p, b, h, m * kBlock, j0);
        if (block.visible == Visible::kNone) continue;
        backward_tile(p, w, worker, block, dq + (h - h0) * head_size + m * kBlock * w.width);
      }
    }
    const int64_t keys = p.N - j0 < kBlock ? p.N - j0 : kBlock;
    write_rows(p.dtype, p.dk, b, kv_head, j0, keys, p.D, w.width, static_cast<Real>(p.score.scale),
               dk);
    write_rows(p.dtype, p.dv, b, kv_head, j0, keys, p.D_v, w.width_v, Real{1}, dv);
  }
}

// Adds the splits' dq and writes one block of queries.
template <typename Real>
void write_dq(const BackwardParams& p, const BackwardWorkspace<Real>& w, int64_t item) {
  const int64_t head = item / w.query_blocks, i0 = item % w.query_blocks * kBlock;
  const int64_t size = kBlock * w.width;
  Real* dq = w.dq + item * size;
  for (int64_t split = 1; split < w.splits; ++split) {
    const Real* other = dq + split * p.B * p.H_q * w.query_blocks * size;
    for (int64_t c = 0; c < size; ++c) dq[c] += other[c];
  }
  const int64_t rows = p.M - i0 < kBlock ? p.M - i0 : kBlock;
  write_rows(p.dtype, p.dq, head / p.H_q, head % p.H_q, i0, rows, p.D, w.width,
             static_cast<Real>(p.score.scale), dq);
}

template <typename Real>
void backward(const BackwardParams& p, const Workers& workers, Arena arena) {
  const BackwardWorkspace<Real> w = lay_out_backward<Real>(p, workers.count, arena);
  for_each(workers, p.B * p.H_kv * w.key_blocks,
           [&](int64_t worker, int64_t item) { pack_keys_backward(p, w, worker, item); });
  for_each(workers, p.B * p.H_q * w.query_blocks,
           [&](int64_t worker, int64_t item) { pack_queries_backward(p, w, worker, item); });
  for_each(workers, p.B * p.H_kv * w.splits, [&](int64_t worker, int64_t item) {
    const int64_t head = item / w.splits;
    backward_split(p, w, worker, head / p.H_kv, head % p.H_kv, item % w.splits);
  });
  for_each(workers, p.B * p.H_q * w.query_blocks,
           [&](int64_t, int64_t item) { write_dq(p, w, item); });
  if (p.dbias.data) bias_gradient(p, w, workers, arena);
}

}  // namespace tk::cpu::TK_ISA
