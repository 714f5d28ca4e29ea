// Forward: o = softmax(s) v and lse, one block of queries at a time.
//
//   for every block of keys that is not hidden:
//     s = scores(q k^T)              kBlock x kBlock, in L1
//     m' = max(m, rowmax s)          running maximum
//     p = exp(s - m')                in place over s
//     l = l exp(m - m') + rowsum p   running denominator
//     o = o exp(m - m') + dropout(p) v
//   o = o / l,  lse = m + log l
//
// Symbols and derivation: docs/attention.md. Milakov and Gimelshein 2018, arXiv:1805.02867.
#pragma once

#include <cmath>

#include "arena.h"
#include "gemm.h"
#include "scores.h"
#include "workers.h"

namespace tk::cpu::TK_ISA {

template <typename Real>
struct ForwardWorkspace {
  int64_t width, width_v, key_blocks;  // padded D and D_v; blocks of keys a head
  Real* k_columns;                     // (B, H_kv, key_blocks, width, kBlock)
  Real* v_rows;                        // (B, H_kv, key_blocks, kBlock, width_v)
  Real* q_rows;                        // (workers, kBlock, width), of the block being worked on
  Real* o;                             // (workers, kBlock, width_v)
  Real* s;                             // (workers, kBlock, kBlock)
  Real* factor;                        // (workers, kBlock, kBlock), with dropout
};

template <typename Real>
ForwardWorkspace<Real> lay_out_forward(const ForwardParams& p, int64_t workers, Arena& arena) {
  ForwardWorkspace<Real> w;
  w.width = padded_width<Real>(p.D);
  w.width_v = padded_width<Real>(p.D_v);
  w.key_blocks = round_up(p.N, kBlock) / kBlock;
  const int64_t keys = p.B * p.H_kv * w.key_blocks * kBlock;
  // k's rows pass through a worker's q_rows on their way to columns.
  w.k_columns = take<Real>(arena, keys * w.width);
  w.v_rows = take<Real>(arena, keys * w.width_v);
  w.q_rows = take<Real>(arena, workers * kBlock * w.width);
  w.o = take<Real>(arena, workers * kBlock * w.width_v);
  w.s = take<Real>(arena, workers * kBlock * kBlock);
  w.factor = take<Real>(arena, p.dropout.p > 0 ? workers * kBlock * kBlock : 0);
  return w;
}

template <typename Real>
void pack_keys_forward(const ForwardParams& p, const ForwardWorkspace<Real>& w, int64_t worker,
                       int64_t item) {
  const int64_t head = item / w.key_blocks, j0 = item % w.key_blocks * kBlock;
  const int64_t b = head / p.H_kv, h = head % p.H_kv;
  const auto used = [&](int64_t j) { return !p.key_used || p.key_used[b * p.N + j]; };
  Real* rows = w.q_rows + worker * kBlock * w.width;
  pack_rows(Slice{p.dtype, p.k, b, h, p.N, p.D}, j0, used, rows);
  transpose_block(rows, w.width, w.k_columns + item * kBlock * w.width);
  pack_rows(Slice{p.dtype, p.v, b, h, p.N, p.D_v}, j0, used, w.v_rows + item * kBlock * w.width_v);
}

// The running maximum and denominator of a block of queries.
template <typename Real>
struct SoftmaxState {
  Real m[kBlock];
  Real l[kBlock];
};

// s becomes p = exp(s - m'), o is rescaled. A row that has seen no key yet has m = -inf.
template <typename Real>
TK_INLINE void online_softmax_row(Real* s, Real& m, Real& l, Real* o, int64_t width_v) {
  constexpr Real kNothing = -static_cast<Real>(__builtin_inf());
  Vec<Real> largest = load(s);
#pragma GCC unroll 4
  for (int64_t c = kLanes<Real>; c < kBlock; c += kLanes<Real>) {
    largest = max<Real>(largest, load(s + c));
  }
  const Real row_max = horizontal_max<Real>(largest);
  const Real new_m = row_max > m ? row_max : m;
  const Real shift = new_m == kNothing ? Real{0} : new_m;
  Vec<Real> sum{};
  for_each_vector(s, [&](Vec<Real> x, int64_t) {
    const Vec<Real> p = exp_of_nonpositive<Real>(x - shift);
    sum += p;
    return p;
  });
  const Real row_sum = horizontal_sum<Real>(sum);
  if (new_m == m) {
    l += row_sum;
    return;
  }
  const Real shrink = std::exp(m - shift);
  l = l * shrink + row_sum;
  m = new_m;
  for (int64_t c = 0; c < width_v; c += kLanes<Real>) store(o + c, load(o + c) * shrink);
}

template <typename Real>
void write_forward(const ForwardParams& p, const Block& block, const SoftmaxState<Real>& state,
                   Real* o, int64_t width_v) {
  Real* lse = static_cast<Real*>(p.lse) + (block.b * p.H_q + block.h) * p.M + block.i0;
  for (int64_t r = 0; r < block.rows; ++r, o += width_v) {
    const Real l = state.l[r];
    lse[r] = state.m[r] + std::log(l);  // log 0 = -inf
    const Real share = l == 0 ? Real{0} : 1 / l;
    for (int64_t c = 0; c < p.D_v; ++c) o[c] *= share;
    write_row(o, p.D_v, p.dtype, p.o.data, row_offset(p.o, block.b, block.h, block.i0 + r),
              p.o.stride[3]);
  }
}

template <typename Real>
void forward_block(const ForwardParams& p, const ForwardWorkspace<Real>& w, int64_t worker,
                   int64_t b, int64_t h, int64_t i0) {
  Real* q = w.q_rows + worker * kBlock * w.width;
  Real* o = w.o + worker * kBlock * w.width_v;
  Real* s = w.s + worker * kBlock * kBlock;
  Real* factor = w.factor + worker * kBlock * kBlock;
  const int64_t kv_head = b * p.H_kv + h / (p.H_q / p.H_kv);

  pack_rows(Slice{p.dtype, p.q, b, h, p.M, p.D}, i0, [](int64_t) { return true; }, q);
  for (int64_t c = 0; c < kBlock * w.width_v; ++c) o[c] = 0;
  SoftmaxState<Real> state;
  for (int64_t r = 0; r < kBlock; ++r) {
    state.m[r] = -static_cast<Real>(__builtin_inf());
    state.l[r] = 0;
  }
  for (int64_t n = 0; n < w.key_blocks; ++n) {
    const Block block = make_block(p, b, h, i0, n * kBlock);
    if (block.visible == Visible::kNone) continue;
    const int64_t tile = kv_head * w.key_blocks + n;
    multiply<Real>(block.rows, kBlock, p.D, {q, w.width, 1}, w.k_columns + tile * kBlock * w.width,
                   kBlock, s, kBlock, Into::kFresh);
    finish_scores<Real>(p, block, s, nullptr);
    for (int64_t r = 0; r < block.rows; ++r) {
      online_softmax_row(s + r * kBlock, state.m[r], state.l[r], o + r * w.width_v, w.width_v);
    }
    if (p.dropout.p > 0) {
      dropout_factors<Real>(p, block, factor);
      for (int64_t c = 0; c < block.rows * kBlock; ++c) s[c] *= factor[c];
    }
    multiply<Real>(block.rows, w.width_v, kBlock, {s, kBlock, 1},
                   w.v_rows + tile * kBlock * w.width_v, w.width_v, o, w.width_v, Into::kSum);
  }
  write_forward(p, make_block(p, b, h, i0, 0), state, o, w.width_v);
}

template <typename Real>
void forward(const ForwardParams& p, const Workers& workers, Arena arena) {
  const ForwardWorkspace<Real> w = lay_out_forward<Real>(p, workers.count, arena);
  for_each(workers, p.B * p.H_kv * w.key_blocks,
           [&](int64_t worker, int64_t item) { pack_keys_forward(p, w, worker, item); });
  const int64_t query_blocks = round_up(p.M, kBlock) / kBlock;
  for_each(workers, p.B * p.H_q * query_blocks, [&](int64_t worker, int64_t item) {
    const int64_t head = item / query_blocks, i0 = item % query_blocks * kBlock;
    forward_block(p, w, worker, head / p.H_q, head % p.H_q, i0);
  });
}

}  // namespace tk::cpu::TK_ISA
