// Backward pass for few queries and many keys, such as a query that pools a sequence. Nothing is
// packed: like decode.h, it reads k and v in place, once for all queries that share them, and it
// writes each row of dk and dv once.
//
//   for each split of the keys of a key head, for each of its blocks:
//     s = scores(q k^T),  dp = do v^T           lanes x keys; a lane is one (head, query)
//     p = exp(s - lse),   ds = p (z dp - delta)
//     dk = scale ds^T q,  dv = (z p)^T do
//     dq += scale ds k                          per split; the splits are added in order
//
// Symbols and derivation: docs/attention.md, sections 1 and 3; options as in score_gradient.h.
#pragma once

#include <algorithm>

#include "cpu/attention/backward.h"
#include "cpu/attention/decode.h"
#include "cpu/engine/fma.h"

namespace tk::cpu::TK_ISA {

template <typename Real>
struct FewQueriesWorkspace {
  int64_t lanes;
  int64_t rows;  // of q, do and dq: the lanes, rounded up to the unit of computation
  int64_t k_width, v_width;
  int64_t splits;       // of one key head
  Real* dq;             // (B H_kv, splits, rows, k_width), in the order of ConvertedRow
  int64_t* unfinished;  // (B H_kv): splits not yet finished
  char* scratch;        // (workers), see FewQueriesScratch
  size_t scratch_bytes;

  Real* dq_of(int64_t head, int64_t split) const {
    return dq + (head * splits + split) * rows * k_width;
  }
};

// Scratch of one worker.
template <typename Real>
struct FewQueriesScratch {
  Real *q, *d_o;                        // (rows, k_width or v_width), in the order of ConvertedRow
  Real *plain_q, *plain_do;             // the same in the order of memory
  Real *lse, *lse_rest, *delta;         // (kDecodeLanes)
  Real *s, *dp, *slope;                 // (kDecodeLanes, kBlock); slope only with is_capped
  Real *transposed, *transposed_slope;  // (kBlock, kDecodeLanes)
  uint64_t* keep;                       // (kBlock), only with dropout
  Real* gradient;                       // (kBlock, k_width or v_width): rows of dk or dv
  char* copy;                           // (kBlock, k_width or v_width), see DecodeScratch
};

template <typename Real>
FewQueriesScratch<Real> lay_out_scratch(const BackwardParams& p, const FewQueriesWorkspace<Real>& w,
                                        Arena& arena) {
  constexpr int64_t kTileSize = kBlock * kDecodeLanes;
  const int64_t width = std::max(w.k_width, w.v_width);
  FewQueriesScratch<Real> t;
  t.q = allocate<Real>(arena, w.rows * w.k_width);
  t.d_o = allocate<Real>(arena, w.rows * w.v_width);
  t.plain_q = allocate<Real>(arena, w.rows * w.k_width);
  t.plain_do = allocate<Real>(arena, w.rows * w.v_width);
  t.lse = allocate<Real>(arena, kDecodeLanes);
  t.lse_rest = allocate<Real>(arena, kDecodeLanes);
  t.delta = allocate<Real>(arena, kDecodeLanes);
  t.s = allocate<Real>(arena, kTileSize);
  t.dp = allocate<Real>(arena, kTileSize);
  t.slope = allocate<Real>(arena, is_capped(p) ? kTileSize : 0);
  t.transposed = allocate<Real>(arena, kTileSize);
  t.transposed_slope = allocate<Real>(arena, is_capped(p) ? kTileSize : 0);
  t.keep = allocate<uint64_t>(arena, p.score.dropout_p > 0 ? kBlock : 0);
  t.gradient = allocate<Real>(arena, kBlock * width);
  t.copy = allocate<char>(arena, kBlock * width * static_cast<int64_t>(sizeof(Real)));
  return t;
}

template <typename Storage, typename Real = typename ConvertedRow<Storage>::Real>
FewQueriesWorkspace<Real> lay_out_few_queries(const BackwardParams& p, int64_t workers,
                                              Arena& arena) {
  FewQueriesWorkspace<Real> w;
  w.lanes = p.H_q / p.H_kv * p.M;
  for_each_lanes<Real>(w.lanes, [&](int64_t lane, auto count) { w.rows = lane + count(); });
  w.k_width = round_up(p.D, kChunk<Storage>);
  w.v_width = round_up(p.D_v, kChunk<Storage>);
  w.splits = round_up(p.N, kSplitKeys) / kSplitKeys;
  w.dq = allocate<Real>(arena, p.B * p.H_kv * w.splits * w.rows * w.k_width);
  w.unfinished = allocate<int64_t>(arena, p.B * p.H_kv);
  Arena one;
  lay_out_scratch(p, w, one);
  w.scratch_bytes = one.used;
  w.scratch = allocate<char>(arena, workers * static_cast<int64_t>(one.used));
  return w;
}

// Rows of q, do or o (rows x padded), in the order of ConvertedRow and in that of memory. Lanes
// with !keep(lane) are 0.
template <typename Storage, typename Real, typename Keep>
void read_lanes(const DecodeHead& at, const Strided& from, int64_t rows, int64_t width,
                int64_t padded, Keep&& keep, char* copy, Real* converted, Real* plain) {
  Storage* const row = reinterpret_cast<Storage*>(copy);
  for (int64_t lane = 0; lane < rows; ++lane, converted += padded, plain += padded) {
    const bool valid = keep(lane);
    const int64_t h = at.q_head + lane / at.p.M, i = lane % at.p.M;
    copy_row(static_cast<const Storage*>(from.data) + (valid ? row_offset(from, at.b, h, i) : 0),
             from.stride[3], valid ? width : 0, padded, row);
    convert_row(row, padded, converted);
    read_as(row, 1, padded, plain);
  }
}

// Reads q, do and the statistics. Fully masked lanes, and those past the last, have weights of 0.
template <typename Storage, typename Real>
void read_few_queries(const BackwardParams& p, const DecodeHead& at,
                      const FewQueriesWorkspace<Real>& w, const FewQueriesScratch<Real>& t) {
  constexpr Real kInfinity = static_cast<Real>(__builtin_inf());
  const auto statistic = [&](const void* of, int64_t lane) {
    const int64_t h = at.q_head + lane / p.M, i = lane % p.M;
    return static_cast<const Real*>(of)[(at.b * p.H_q + h) * p.lse_stride + i];
  };
  const auto keep = [&](int64_t lane) {
    return lane < w.lanes && statistic(p.lse, lane) != -kInfinity;
  };
  read_lanes<Storage>(at, p.q, w.rows, p.D, w.k_width, keep, t.copy, t.q, t.plain_q);
  Real *const o = t.gradient, *const plain_o = o + w.rows * w.v_width;
  read_lanes<Storage>(at, p.o, w.rows, p.D_v, w.v_width, keep, t.copy, o, plain_o);
  read_lanes<Storage>(at, p.d_o, w.rows, p.D_v, w.v_width, keep, t.copy, t.d_o, t.plain_do);
  for (int64_t lane = 0; lane < w.rows; ++lane) {
    const bool valid = keep(lane);
    t.lse[lane] = valid ? statistic(p.lse, lane) : kInfinity;
    t.lse_rest[lane] = valid ? statistic(p.lse_rest, lane) : Real{0};
    Vec<Real> sum = {};
    for (int64_t c = lane * w.v_width; c < (lane + 1) * w.v_width; c += kLanes<Real>) {
      sum += load(o + c) * load(t.d_o + c);
    }
    t.delta[lane] = reduce<Real>(sum, [](Vec<Real> a, Vec<Real> b) { return a + b; })[0];
    if (valid && p.dlse) t.delta[lane] -= statistic(p.dlse, lane);
  }
}

// s becomes the weights after dropout, dp the gradient of the scaled products. Both are 0 in the
// lanes past the last, which are multiplied too.
template <typename Real>
void few_gradients(const BackwardParams& p, const FewQueriesWorkspace<Real>& w,
                   const FewQueriesScratch<Real>& t, const Block& block) {
  using Exponents = WeightExponents<Fma<Real>>;
  const Exponents exponents(p, t.lse, t.lse_rest, 0);
  const Real kept = keep_factor<Real>(p);
  const bool drops = p.score.dropout_p > 0;
  if (drops) dropout_bits<Real, kDecodeLanes>(p, block, t.keep);
  for (int64_t lane = 0; lane < block.queries; ++lane) {
    const typename Exponents::Base base = {broadcast(t.lse[lane]),
                                           broadcast(t.lse_rest[lane] * Exponents::kLog2E)};
    Real *const s = t.s + lane * kBlock, *const dp = t.dp + lane * kBlock;
    for (int64_t r = 0; drops && r < block.keys; ++r) {
      dp[r] = t.keep[r] >> lane & 1 ? dp[r] * kept : Real{0};
    }
    for (int64_t r = 0; r < block.keys; r += kLanes<Real>) {
      const Vec<Real> weight = exp2<Real, Precision::kReal>(exponents.exponent(load(s + r), base));
      Vec<Real> ds = weight * (load(dp + r) - t.delta[lane]);
      if (is_capped(p)) ds *= load(t.slope + lane * kBlock + r);
      store(s + r, weight);
      store(dp + r, ds);
    }
    for (int64_t r = 0; drops && r < block.keys; ++r) s[r] = t.keep[r] >> lane & 1 ? s[r] : Real{0};
  }
  clear(t.s + block.queries * kBlock, (w.rows - block.queries) * kBlock);
  clear(t.dp + block.queries * kBlock, (w.rows - block.queries) * kBlock);
}

// Writes rows of dk or dv: the sums over lanes of weights (lanes x kBlock) times rows.
template <typename Real>
void write_few_gradients(const BackwardParams& p, const DecodeHead& at, const Block& block,
                         const Real* weights, const Real* rows, int64_t width, int64_t padded,
                         Real factor, Real* sums, const Strided& to) {
  for_each_lanes<Real>(block.queries, [&](int64_t lane, auto queries) {
    multiply_outer<queries()>(weights + lane * kBlock, kBlock, rows + lane * padded, padded,
                              block.keys, lane > 0, sums);
  });
  const int64_t keys = std::min(p.N - block.j0, kBlock), computed = std::min(keys, block.keys);
  write_rows(p.dtype, to, at.b, at.head, block.j0, computed, width, padded, factor, sums);
  clear_rows(p.dtype, to, at.b, at.head, block.j0 + computed, keys - computed, width);
}

// Adds the splits of dq and writes it.
template <typename Storage, typename Real>
void write_few_dq(const BackwardParams& p, const DecodeHead& at, const FewQueriesWorkspace<Real>& w,
                  int64_t head, Real* row) {
  Real* const dq = w.dq_of(head, 0);
  for (int64_t split = 1; split < w.splits; ++split) {
    const Real* const other = w.dq_of(head, split);
    for (int64_t c = 0; c < w.rows * w.k_width; ++c) dq[c] += other[c];
  }
  for (int64_t lane = 0; lane < w.lanes; ++lane) {
    const Real* const from = dq + lane * w.k_width;
    for (int64_t c = 0; c < p.D; ++c) row[c] = from[converted_index<Storage>(c)];
    const int64_t offset = row_offset(p.dq, at.b, at.q_head + lane / p.M, lane % p.M);
    write_row(row, p.D, static_cast<Real>(p.score.scale), p.dtype, p.dq.data, offset,
              p.dq.stride[3]);
  }
}

// One split of the keys of `head`, which counts over the batch.
template <typename Storage, typename Real>
void few_queries_split(const BackwardParams& p, const FewQueriesWorkspace<Real>& w,
                       const FewQueriesScratch<Real>& t, int64_t head, int64_t split) {
  const int64_t b = head / p.H_kv, h = head % p.H_kv;
  const LiveKeys is_live{visible_key_range(p, b), live_keys_of(p, b, h)};
  const DecodeHead at{p, 0, b, h, h * (p.H_q / p.H_kv), is_live};
  const Slice k = keys_of(p, p.k, b, h, p.D), v = keys_of(p, p.v, b, h, p.D_v);
  read_few_queries<Storage>(p, at, w, t);
  Real* const dq = w.dq_of(head, split);
  clear(dq, w.rows * w.k_width);
  const int64_t first = split * kSplitKeys, last = std::min(first + kSplitKeys, p.N);
  for (int64_t j0 = first; j0 < last; j0 += kBlock) {
    Block block{b, at.q_head, 0, j0, w.lanes, p.M, 0, 0, {}, {}};
    clip_to_visible(p, block);
    block.keys += std::exchange(block.first, 0);  // rows are read from the start of the block
    if (block.visible == Visible::kEmpty) {
      clear_rows(p.dtype, p.dk, b, h, j0, std::min(p.N - j0, kBlock), p.D);
      clear_rows(p.dtype, p.dv, b, h, j0, std::min(p.N - j0, kBlock), p.D_v);
      continue;
    }
    const bool readable = all_live(is_live, block);
    multiply_block<Storage>(at, k, block, readable, t.q, w.k_width, t.copy, t.s);
    if (needs_finishing(p, block)) {
      finish_transposed(p, block, t.s, t.transposed, is_capped(p) ? t.transposed_slope : nullptr);
    }
    if (is_capped(p)) transpose_tile<kBlock, kDecodeLanes>(t.transposed_slope, t.slope);
    multiply_block<Storage>(at, v, block, readable, t.d_o, w.v_width, t.copy, t.dp);
    few_gradients(p, w, t, block);
    add_block<Storage>(at, k, block, readable, t.dp, w.k_width, t.copy, dq);
    write_few_gradients(p, at, block, t.dp, t.plain_q, p.D, w.k_width,
                        static_cast<Real>(p.score.scale), t.gradient, p.dk);
    write_few_gradients(p, at, block, t.s, t.plain_do, p.D_v, w.v_width, keep_factor<Real>(p),
                        t.gradient, p.dv);
  }
  // The worker that finishes the last split of a head adds its splits.
  if (__atomic_sub_fetch(w.unfinished + head, 1, __ATOMIC_ACQ_REL) != 0) return;
  write_few_dq<Storage>(p, at, w, head, t.gradient);
}

TK_INLINE size_t few_queries_workspace(const BackwardParams& p, const Workers& workers) {
  return with_storage(p, [&](auto, auto element) {
    Arena arena;
    lay_out_few_queries<decltype(element)>(p, workers.count, arena);
    return arena.used;
  });
}

TK_INLINE void backward_few_queries(const BackwardParams& p, const Workers& workers, Arena arena) {
  with_storage(p, [&](auto element, auto) {
    using Storage = decltype(element);
    const auto w = lay_out_few_queries<Storage>(p, workers.count, arena);
    std::fill_n(w.unfinished, p.B * p.H_kv, w.splits);
    // Heads vary fastest, as in decode.h.
    const int64_t heads = p.B * p.H_kv;
    for_each(workers, heads * w.splits, [&](int64_t worker, int64_t item) {
      Arena own{w.scratch + static_cast<size_t>(worker) * w.scratch_bytes};
      few_queries_split<Storage>(p, w, lay_out_scratch(p, w, own), item % heads, item / heads);
    });
  });
}

}  // namespace tk::cpu::TK_ISA
