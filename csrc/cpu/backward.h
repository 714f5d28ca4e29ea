// Backward: dq, dk, dv, by blocks of keys. The scores are recomputed from lse; nothing of size
// M x N is stored.
//
//   for every block of keys, for every query head of its group, for every block of queries:
//     p, ds = score_gradient            keys x queries
//     dv += dropout(p) do,  dk += scale ds q,  dq^T += scale k^T ds
//
// dk and dv of a block stay in cache. Each split of the keys sums a dq of its own, and the splits
// are added in order, so gradients do not depend on which thread ran first.
#pragma once

#include "bias_gradient.h"
#include "score_gradient.h"

namespace tk::cpu::TK_ISA {

template <typename Real>
TK_INLINE void multiply_by_slope(const Real* slope, int64_t r, int64_t lane,
                                 Vec<Real> (&ds)[2][2]) {
  for (int half = 0; half < 2; ++half) {
    for (int n = 0; n < 2; ++n) {
      ds[half][n] *= load(slope + (r + half * kKeyGroup / 2) * kBlock + lane + n * kLanes<Real>);
    }
  }
}

// Whether every weight has a bias of its own: the bias's gradient is then ds itself.
TK_INLINE bool writes_ds(const BackwardParams& p) {
  const int64_t* size = p.bias_size;
  return p.dbias.data && size[0] == p.B && size[1] == p.H_q && size[2] == p.M && size[3] == p.N;
}

// Writes the tile of dbias at (i0, j0) from t.ds (keys x queries); t.s is overwritten.
template <typename Engine>
void write_ds(const BackwardParams& p, const BackwardScratch<Engine>& t, const Block& block) {
  transpose_tile(t.ds, t.s);
  write_tile(p, {}, block.b, block.h, block.i0, block.j0, t.s);
}

template <typename Engine>
void backward_tile(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                   const BackwardScratch<Engine>& t, const Block& block,
                   typename Engine::Real* dq) {
  using Real = typename Engine::Real;
  using Product = typename Engine::Product;
  const typename BackwardScratch<Engine>::Weights weights(t.s, t.weights);
  const typename BackwardScratch<Engine>::Gradient gradient(t.dp, t.gradient);
  const bool capped = p.score.softcap != 0, wants_ds = writes_ds(p);
  if (wants_ds) clear(t.ds, kBlock * kBlock);
  score_gradient(p, w, t, block,
                 [&](int64_t row, int64_t lane, const Vec<Real>(&weight)[2][2],
                     Vec<Real>(&ds)[2][2]) TK_INLINE_LAMBDA {
                   if (wants_ds) add_to_tile(block, row, lane, ds, t.ds);
                   if (capped) multiply_by_slope(t.slope, row, lane, ds);
                   weights.put(row, lane, weight);
                   gradient.put(row, lane, ds);
                 });
  const int64_t kv_head = block.b * p.H_kv + block.h / (p.H_q / p.H_kv);
  const auto query_panel =
      static_cast<size_t>((block.b * p.H_q + block.h) * w.query_blocks + block.i0 / kBlock);
  const auto key_panel = static_cast<size_t>(kv_head * w.key_blocks + block.j0 / kBlock);
  const Product dv{weights.left(), Engine::right(w.d_o, w.do_panels + query_panel * w.d_o.bytes),
                   kBlock};
  const Product dk{gradient.left(), Engine::right(w.q, w.q_panels + query_panel * w.q.bytes),
                   kBlock};
  const Product dq_t{Engine::left_t(w.k, w.k_panels + key_panel * w.k.bytes, block.first),
                     gradient.right(0), block.keys};
  Engine::template multiply<Exact::kMostly>(block.keys, w.v.width, &dv, 1,
                                            t.dv + block.first * w.v.width, w.v.width, Into::kSum);
  Engine::template multiply<Exact::kMostly>(block.keys, w.k.width, &dk, 1,
                                            t.dk + block.first * w.k.width, w.k.width, Into::kSum);
  Engine::template multiply<Exact::kMostly>(w.k.width, kBlock, &dq_t, 1, dq, kBlock, Into::kSum);
  if (wants_ds) write_ds(p, t, block);
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
template <typename Engine>
void backward_split(const BackwardParams& p, const BackwardWorkspace<Engine>& w, int64_t worker,
                    int64_t b, int64_t kv_head, int64_t split) {
  using Real = typename Engine::Real;
  [[maybe_unused]] const typename Engine::Session session;
  const BackwardScratch<Engine> t = scratch_of(p, w, worker);
  const int64_t group = p.H_q / p.H_kv, head_size = w.query_blocks * kBlock * w.k.width;
  const int64_t h0 = kv_head * group;
  Real* dq = w.dq + ((split * p.B + b) * p.H_q + h0) * head_size;
  clear(dq, group * head_size);
  for (int64_t n = split; n < w.key_blocks; n += w.splits) {
    const int64_t j0 = n * kBlock;
    clear(t.dk, kBlock * w.k.width);
    clear(t.dv, kBlock * w.v.width);
    for (int64_t h = h0; h < h0 + group; ++h) {
      for (int64_t m = 0; m < w.query_blocks; ++m) {
        Block block = make_block(p, b, h, m * kBlock, kBlock, j0);
        block.next_i = kBlock;
        if (block.visible == Visible::kNone) {
          if (!writes_ds(p)) continue;
          clear(t.ds, kBlock * kBlock);
          write_ds(p, t, block);
          continue;
        }
        backward_tile(p, w, t, block, dq + (h - h0) * head_size + m * kBlock * w.k.width);
      }
    }
    const int64_t keys = p.N - j0 < kBlock ? p.N - j0 : kBlock;
    write_rows(p.dtype, p.dk, b, kv_head, j0, keys, p.D, w.k.width,
               static_cast<Real>(p.score.scale), t.dk);
    write_rows(p.dtype, p.dv, b, kv_head, j0, keys, p.D_v, w.v.width, keep_factor<Real>(p), t.dv);
  }
}

// Adds the splits' dq and writes one block of queries.
template <typename Engine>
void write_dq(const BackwardParams& p, const BackwardWorkspace<Engine>& w, int64_t worker,
              int64_t item) {
  using Real = typename Engine::Real;
  constexpr int64_t W = kLanes<Real>;
  const int64_t head = item / w.query_blocks, i0 = item % w.query_blocks * kBlock;
  const int64_t size = kBlock * w.k.width;
  const int64_t stride = p.B * p.H_q * w.query_blocks * size;
  const Real* dq = w.dq + item * size;
  Real* rows = scratch_of(p, w, worker).rows;
  for (int64_t c = 0; c < w.k.width; c += W) {
    for (int64_t lane = 0; lane < kBlock; lane += W) {
      Vec<Real> square[W];
      for (int64_t n = 0; n < W; ++n) {
        const Real* from = dq + (c + n) * kBlock + lane;
        square[n] = load(from);
        for (int64_t split = 1; split < w.splits; ++split) square[n] += load(from + split * stride);
      }
      transpose<Real>(square);
      for (int64_t n = 0; n < W; ++n) store(rows + (lane + n) * w.k.width + c, square[n]);
    }
  }
  const int64_t queries = p.M - i0 < kBlock ? p.M - i0 : kBlock;
  write_rows(p.dtype, p.dq, head / p.H_q, head % p.H_q, i0, queries, p.D, w.k.width,
             static_cast<Real>(p.score.scale), rows);
}

// False: the engine cannot take these numbers, and what was written is of no use.
template <typename Engine>
bool backward(const BackwardParams& p, const Workers& workers, Arena arena) {
  const BackwardWorkspace<Engine> w = lay_out_backward<Engine>(p, workers.count, arena);
  *w.finite = true;
  for_each(workers, p.B * p.H_kv * w.key_blocks,
           [&](int64_t worker, int64_t item) { pack_keys_backward(p, w, worker, item); });
  for_each(workers, p.B * p.H_q * w.query_blocks,
           [&](int64_t worker, int64_t item) { pack_queries_backward(p, w, worker, item); });
  if (!*w.finite) return false;
  for_each(workers, p.B * p.H_kv * w.splits, [&](int64_t worker, int64_t item) {
    const int64_t head = item / w.splits;
    backward_split(p, w, worker, head / p.H_kv, head % p.H_kv, item % w.splits);
  });
  for_each(workers, p.B * p.H_q * w.query_blocks,
           [&](int64_t worker, int64_t item) { write_dq(p, w, worker, item); });
  if (p.dbias.data && !writes_ds(p)) bias_gradient(p, w, workers, arena);
  return true;
}

}  // namespace tk::cpu::TK_ISA
