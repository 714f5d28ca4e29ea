// Forward for few queries and many keys, as when a model writes text token by token. Its time is
// that of reading k and v: so they are read once, in place and in their own dtype, for all the
// queries that share them.
//
//   for every split of the keys of a key head, for every block of it that is not hidden:
//     s = scores(q k^T)              lanes x keys; a lane is one (head, query) of the group
//     m' = max(m, row max of s)      running maximum
//     p = exp(s - m')
//     l = l exp(m - m') + row sum of p
//     o = o exp(m - m') + dropout(p) v
//   o, lse = the splits' sums, merged in order
//
// Where splits begin depends on N alone, so results do not depend on the number of threads.
// Symbols and derivation: docs/attention.md, sections 1 and 5.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "arena.h"
#include "decode_rows.h"
#include "dropout.h"
#include "softmax.h"
#include "workers.h"

namespace tk::cpu::TK_ISA {

constexpr int64_t kDecodeLanes = 16;  // a whole number of vectors in every instruction set
constexpr int64_t kSplitKeys = 512;   // many beside one o, few beside what a worker has to do

// With more queries packed keys (forward.h) are the faster way. Where tiles multiply bfloat16 they
// are so with few queries already, but for many heads that share a key head.
TK_INLINE bool is_decoding(const Problem& p) {
#if defined(__AMX_BF16__)
  if (p.dtype == DType::kBFloat16 && p.M > 4) return false;
#endif
  return p.M > 0 && p.H_q / p.H_kv * p.M <= kDecodeLanes;
}

// What has been summed over one split of the keys.
template <typename Real>
struct Partial {
  SoftmaxState<Real, kDecodeLanes>* state;
  Real* o;  // (rows, v_width)
};

template <typename Real>
struct DecodeWorkspace {
  int64_t lanes;  // queries that share a key head
  int64_t rows;   // of q and o: lanes, filled up to what is computed together
  int64_t k_width, v_width, splits;
  SoftmaxState<Real, kDecodeLanes>* states;  // (B, H_kv, splits)
  Real* o;                                   // (B, H_kv, splits, rows, v_width)
  int64_t* unfinished;                       // (B, H_kv): splits that are still to be summed
  char* scratch;                             // (workers), see DecodeScratch
  size_t scratch_bytes;

  Partial<Real> partial(int64_t kv_head, int64_t split) const {
    const int64_t n = kv_head * splits + split;
    return {states + n, o + n * rows * v_width};
  }
};

// One worker's, small enough to stay in its cache.
template <typename Real>
struct DecodeScratch {
  Real* q;         // (rows, k_width)
  Real* s;         // (kDecodeLanes, kBlock), of which `rows` are computed
  Real* turned;    // (kBlock, kDecodeLanes): s as finish_scores wants it
  uint64_t* keep;  // (kBlock), with dropout
  Real* row;       // (v_width)
  char* copy;      // (kBlock, k_width or v_width): a block of k or v that cannot be read in place
};

// visit(first lane, number of lanes as a constant) until `lanes` are covered.
template <typename Real, typename Visit>
TK_INLINE void for_each_lanes(int64_t lanes, Visit&& visit) {
  constexpr int kMost = kLanes<Real> < 4 ? kLanes<Real> : 4;  // more would not fit in registers
  int64_t lane = 0;
  for (; lanes - lane > 2; lane += kMost) visit(lane, std::integral_constant<int, kMost>());
  if (lanes - lane == 2) visit(lane, std::integral_constant<int, 2>());
  if (lanes - lane == 1) visit(lane, std::integral_constant<int, 1>());
}

template <typename Real>
DecodeScratch<Real> lay_out_scratch(const ForwardParams& p, const DecodeWorkspace<Real>& w,
                                    Arena& arena) {
  constexpr int64_t kTileSize = kBlock * kDecodeLanes;
  DecodeScratch<Real> t;
  t.q = take<Real>(arena, w.rows * w.k_width);
  t.s = take<Real>(arena, kTileSize);
  t.turned = take<Real>(arena, kTileSize);
  t.keep = take<uint64_t>(arena, p.dropout.p > 0 ? kBlock : 0);
  t.row = take<Real>(arena, w.v_width);
  const int64_t width = std::max(w.k_width, w.v_width);
  t.copy = take<char>(arena, kBlock * width * static_cast<int64_t>(sizeof(Real)));
  return t;
}

template <typename Storage, typename Real = typename Wide<Storage>::Real>
DecodeWorkspace<Real> lay_out_decode(const ForwardParams& p, int64_t workers, Arena& arena) {
  DecodeWorkspace<Real> w;
  w.lanes = p.H_q / p.H_kv * p.M;
  for_each_lanes<Real>(w.lanes, [&](int64_t lane, auto count) { w.rows = lane + count(); });
  w.k_width = round_up(p.D, kChunk<Storage>);
  w.v_width = round_up(p.D_v, kChunk<Storage>);
  w.splits = p.N > 0 ? round_up(p.N, kSplitKeys) / kSplitKeys : 1;
  const int64_t kv_heads = p.B * p.H_kv, partials = kv_heads * w.splits;
  w.states = take<SoftmaxState<Real, kDecodeLanes>>(arena, partials);
  w.o = take<Real>(arena, partials * w.rows * w.v_width);
  w.unfinished = take<int64_t>(arena, kv_heads);
  Arena one;
  lay_out_scratch(p, w, one);
  w.scratch_bytes = one.used;
  w.scratch = take<char>(arena, workers * static_cast<int64_t>(one.used));
  return w;
}

// Whether some query may see each of the block's keys, as far as key_used knows.
TK_INLINE bool all_used(const Problem& p, const Block& block) {
  if (block.j0 + block.keys > p.N) return false;
  uint8_t used = 1;
  for (int64_t j = block.j0; p.key_used && j < block.j0 + block.keys; ++j) {
    used &= p.key_used[block.b * p.N + j];
  }
  return used != 0;
}

// `known` elements, `stride` apart, and zeros up to `width`.
template <typename Storage>
void copy_row(const Storage* from, int64_t stride, int64_t known, int64_t width, Storage* to) {
  if (stride == 1) {
    __builtin_memcpy(to, from, static_cast<size_t>(known) * sizeof(Storage));
  } else {
    for (int64_t c = 0; c < known; ++c) to[c] = from[c * stride];
  }
  for (int64_t c = known; c < width; ++c) to[c] = Storage{};
}

// A block of k or v: where it lies if it can be read in whole chunks and all of it may be read,
// else a copy, with zeros for what must not be read.
template <typename Storage>
Rows<Storage> rows_of(const Problem& p, const Slice& x, const Block& block, bool readable,
                      int64_t width, char* copy) {
  const Storage* from =
      static_cast<const Storage*>(x.tensor.data) + row_offset(x.tensor, x.b, x.h, block.j0);
  const int64_t* stride = x.tensor.stride;
  if (readable && stride[3] == 1 && x.width == width) return {from, stride[2]};
  Storage* to = reinterpret_cast<Storage*>(copy);
  for (int64_t r = 0; r < block.keys; ++r, to += width) {
    const int64_t j = block.j0 + r;
    const bool used = j < p.N && (!p.key_used || p.key_used[x.b * p.N + j]);
    copy_row(from + r * stride[2], stride[3], used ? x.width : 0, width, to);
  }
  return {reinterpret_cast<Storage*>(copy), width};
}

// A lane's scores become weights 2^(to_log2 s - m); its m and l follow. What was summed with
// weights before is to be multiplied by the result. keys is a multiple of two vectors.
template <typename Real>
TK_INLINE Real weigh(Real* s, int64_t keys, Real to_log2, Real& m, Real& l) {
  constexpr int64_t W = kLanes<Real>;
  constexpr Real kNothing = SoftmaxState<Real, kDecodeLanes>::kNothing;
  const Vec<Real> nothing = broadcast(kNothing), before = broadcast(m);
  Vec<Real> largest[2] = {nothing, nothing}, sum = {};
  for (int64_t r = 0; r < keys; r += 2 * W) {
    largest[0] = max<Real>(largest[0], load(s + r));
    largest[1] = max<Real>(largest[1], load(s + r + W));
  }
  const Vec<Real> found = fold<Real>(max<Real>(largest[0], largest[1]), max<Real>);
  const Vec<Real> raised = max<Real>(before, found * to_log2);
  const Vec<Real> shift = raised == nothing ? Vec<Real>{} : raised;
  for (int64_t r = 0; r < keys; r += W) {
    const Vec<Real> weight = exp2<Real, Precision::kReal>(load(s + r) * to_log2 - shift);
    sum += weight;
    store(s + r, weight);
  }
  const Vec<Real> shrink = exp2<Real, Precision::kReal>(before - shift);
  m = raised[0];
  l = l * shrink[0] + fold<Real>(sum, [](Vec<Real> a, Vec<Real> b) { return a + b; })[0];
  return shrink[0];
}

// Scores that are more than a product, which are finished a query in each lane.
template <typename Real>
void finish_turned(const ForwardParams& p, const Block& block, const DecodeScratch<Real>& t) {
  transpose_tile<kDecodeLanes, kBlock>(t.s, t.turned);
  finish_scores<Real, kDecodeLanes>(p, block, t.turned, nullptr);
  transpose_tile<kBlock, kDecodeLanes>(t.turned, t.s);
}

template <typename Storage, typename Real>
void decode_block(const ForwardParams& p, const DecodeWorkspace<Real>& w,
                  const DecodeScratch<Real>& t, const Block& block, const Partial<Real>& sums) {
  const bool readable = all_used(p, block);
  const int64_t head = block.h / (p.H_q / p.H_kv);
  const Slice k_slice{p.dtype, p.k, block.b, head, p.N, p.D};
  const auto k = rows_of<Storage>(p, k_slice, block, readable, w.k_width, t.copy);
  for_each_lanes<Real>(w.lanes, [&](int64_t lane, auto queries) {
    multiply_rows<queries()>(k, block.keys, t.q + lane * w.k_width, w.k_width, t.s + lane * kBlock,
                             kBlock);
  });
  if (is_unfinished(p, block)) finish_turned(p, block, t);

  const Real to_log2 = static_cast<Real>(score_to_log2(p));
  for (int64_t lane = 0; lane < w.rows; ++lane) {
    const Real shrink =
        weigh(t.s + lane * kBlock, block.keys, to_log2, sums.state->m[lane], sums.state->l[lane]);
    if (shrink == 1) continue;
    for_each_vector(sums.o + lane * w.v_width, w.v_width,
                    [&](Vec<Real> x, int64_t) { return x * shrink; });
  }
  if (p.dropout.p > 0) {
    dropout_bits<Real, kDecodeLanes>(p, block, t.keep);
    for (int64_t lane = 0; lane < w.lanes; ++lane) {
      for (int64_t r = 0; r < block.keys; ++r) {
        if (!(t.keep[r] >> lane & 1)) t.s[lane * kBlock + r] = 0;
      }
    }
  }
  const Slice v_slice{p.dtype, p.v, block.b, head, p.N, p.D_v};
  const auto v = rows_of<Storage>(p, v_slice, block, readable, w.v_width, t.copy);
  for_each_lanes<Real>(w.lanes, [&](int64_t lane, auto queries) {
    add_rows<queries()>(v, block.keys, t.s + lane * kBlock, kBlock, sums.o + lane * w.v_width,
                        w.v_width, w.v_width);
  });
}

// sums += part, of two sets of keys: docs/attention.md, section 5.
template <typename Real>
void merge(const DecodeWorkspace<Real>& w, const Partial<Real>& sums, const Partial<Real>& part) {
  for (int64_t lane = 0; lane < w.lanes; ++lane) {
    Real &m = sums.state->m[lane], &l = sums.state->l[lane];
    const Real raised = part.state->m[lane] > m ? part.state->m[lane] : m;
    const Real shift = raised == sums.state->kNothing ? Real{0} : raised;
    const Real share = std::exp2(m - shift), part_share = std::exp2(part.state->m[lane] - shift);
    m = raised;
    l = l * share + part.state->l[lane] * part_share;
    const Real* from = part.o + lane * w.v_width;
    for_each_vector(sums.o + lane * w.v_width, w.v_width, [&](Vec<Real> x, int64_t c) {
      return x * share + load(from + c) * part_share;
    });
  }
}

// Writes o and lse of the queries of one key head.
template <typename Storage, typename Real>
void finish_head(const ForwardParams& p, const DecodeWorkspace<Real>& w, int64_t kv_head,
                 Real* row) {
  const Partial<Real> sums = w.partial(kv_head, 0);
  for (int64_t split = 1; split < w.splits; ++split) merge(w, sums, w.partial(kv_head, split));
  const int64_t b = kv_head / p.H_kv, group = p.H_q / p.H_kv;
  Real lse[kDecodeLanes];
  for (int64_t lane = 0; lane < kDecodeLanes; lane += kLanes<Real>) {
    store(lse + lane, sums.state->lse(lane));
  }
  for (int64_t lane = 0; lane < w.lanes; ++lane) {
    const int64_t h = kv_head % p.H_kv * group + lane / p.M, i = lane % p.M;
    const Real l = sums.state->l[lane];
    const Real share = l == 0 ? Real{0} : keep_factor<Real>(p) / l;
    const Real* o = sums.o + lane * w.v_width;
    for (int64_t c = 0; c < p.D_v; ++c) row[c] = o[place<Storage>(c)] * share;
    write_row(row, p.D_v, p.dtype, p.o.data, row_offset(p.o, b, h, i), p.o.stride[3]);
    static_cast<Real*>(p.lse)[(b * p.H_q + h) * p.lse_stride + i] = lse[lane];
  }
}

// q (rows x k_width) of one key head's queries, 0 where there is none.
template <typename Storage, typename Real>
void read_queries(const ForwardParams& p, const DecodeWorkspace<Real>& w, int64_t kv_head,
                  Storage* row, Real* q) {
  const int64_t b = kv_head / p.H_kv, group = p.H_q / p.H_kv;
  for (int64_t lane = 0; lane < w.rows; ++lane, q += w.k_width) {
    const int64_t h = kv_head % p.H_kv * group + lane / p.M;
    const Storage* from = static_cast<const Storage*>(p.q.data) + row_offset(p.q, b, h, lane % p.M);
    copy_row(from, p.q.stride[3], lane < w.lanes ? p.D : 0, w.k_width, row);
    widen(row, w.k_width, q);
  }
}

template <typename Storage, typename Real>
void decode_split(const ForwardParams& p, const DecodeWorkspace<Real>& w,
                  const DecodeScratch<Real>& t, int64_t kv_head, int64_t split) {
  const int64_t b = kv_head / p.H_kv, h = kv_head % p.H_kv * (p.H_q / p.H_kv);
  const Partial<Real> sums = w.partial(kv_head, split);
  sums.state->clear();
  for (int64_t c = 0; c < w.rows * w.v_width; ++c) sums.o[c] = 0;
  read_queries(p, w, kv_head, reinterpret_cast<Storage*>(t.copy), t.q);
  const int64_t first = split * kSplitKeys;
  const int64_t last = first + kSplitKeys < p.N ? first + kSplitKeys : p.N;
  for (int64_t j0 = first; j0 < last; j0 += kBlock) {
    Block block{b, h, 0, j0, w.lanes, p.M, 0, 0, {}, {}};
    look(p, block);
    block.keys += std::exchange(block.first, 0);  // rows of k and v are read from the block's first
    if (block.visible != Visible::kNone) decode_block<Storage>(p, w, t, block, sums);
  }
  // Whoever sums a head's last split finishes the head.
  if (__atomic_sub_fetch(w.unfinished + kv_head, 1, __ATOMIC_ACQ_REL) == 0) {
    finish_head<Storage>(p, w, kv_head, t.row);
  }
}

template <typename Storage>
void decode(const ForwardParams& p, const Workers& workers, Arena arena) {
  const auto w = lay_out_decode<Storage>(p, workers.count, arena);
  const int64_t kv_heads = p.B * p.H_kv;
  for (int64_t n = 0; n < kv_heads; ++n) w.unfinished[n] = w.splits;
  // Heads first: workers that read far apart are faster.
  for_each(workers, kv_heads * w.splits, [&](int64_t worker, int64_t item) {
    Arena own{w.scratch + static_cast<size_t>(worker) * w.scratch_bytes};
    decode_split<Storage>(p, w, lay_out_scratch(p, w, own), item % kv_heads, item / kv_heads);
  });
}

// run(an element of the dtype)
template <typename Run>
TK_INLINE auto with_storage(DType dtype, Run&& run) {
  switch (dtype) {
    case DType::kFloat16:
      return run(Float16{});
    case DType::kBFloat16:
      return run(BFloat16{});
    case DType::kFloat32:
      return run(float{});
    case DType::kFloat64:
      break;
  }
  return run(double{});
}

TK_INLINE size_t decode_workspace(const ForwardParams& p, const Workers& workers) {
  return with_storage(p.dtype, [&](auto element) {
    Arena arena;
    lay_out_decode<decltype(element)>(p, workers.count, arena);
    return arena.used;
  });
}

TK_INLINE void run_decode(const ForwardParams& p, const Workers& workers, Arena arena) {
  with_storage(p.dtype, [&](auto element) { decode<decltype(element)>(p, workers, arena); });
}

}  // namespace tk::cpu::TK_ISA
