// Forward pass for few queries and many keys (decoding). Its time is that of reading k and v: they
// are read once, in place and in their own dtype, for all queries that share them. An int8 cache
// has a scale for each key and each value: that of a key multiplies its scores, that of a value its
// weights.
//
//   for each split of the keys of a key head, for each of its visible blocks:
//     s = scores(q k^T)              lanes x keys; a lane is one (head, query) of the group, which
//                                    may take several tiles
//     m' = max(m, row max of s)      running maximum
//     p = exp(s - m')
//     l = l exp(m - m') + row sum of p
//     o = o exp(m - m') + dropout(p) v
//   o, lse = the splits' partial results, combined in order
//
// The first visible key determines where splits begin, not the number of threads: results do not
// depend on it. Each sequence of a cache has its own number of keys. In a paged cache a block is
// read in contiguous runs of rows.
// Symbols and derivation: docs/attention.md, sections 1 and 5.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu/attention/decode_workspace.h"
#include "cpu/attention/dropout.h"
#include "cpu/engine/workers.h"

namespace tk::cpu::TK_ISA {

constexpr int64_t kPrefetchRows = 32;  // prefetch distance in rows

// True if all keys of the block may be read.
TK_INLINE bool all_live(const LiveKeys& keys, const Block& block) {
  if (block.j0 < keys.range.begin || block.j0 + block.keys > keys.range.end) return false;
  uint8_t live = 1;
  for (int64_t j = block.j0; keys.by_element && j < block.j0 + block.keys; ++j) {
    live &= keys.by_element[j];
  }
  return live != 0;
}

// Copies `count` elements, `stride` apart, and pads with zeros to `width`.
template <typename Storage>
void copy_row(const Storage* from, int64_t stride, int64_t count, int64_t width, Storage* to) {
  if (stride == 1) {
    __builtin_memcpy(to, from, static_cast<size_t>(count) * sizeof(Storage));
  } else {
    for (int64_t c = 0; c < count; ++c) to[c] = from[c * stride];
  }
  for (int64_t c = count; c < width; ++c) to[c] = Storage{};
}

// Copies a block of k or v, with zeros for keys that must not be read.
template <typename Storage>
Rows<Storage> copy_block(const DecodeHead& at, const Slice& x, const Block& block, int64_t width,
                         char* copy) {
  const Storage* from = static_cast<const Storage*>(x.tensor.data);
  Storage* to = reinterpret_cast<Storage*>(copy);
  for (int64_t r = 0; r < block.keys; ++r, to += width) {
    const int64_t j = block.j0 + r;
    const bool readable = at.is_live(j);
    copy_row(from + (readable ? x.offset(j) : 0), x.tensor.stride[3], readable ? x.width : 0, width,
             to);
  }
  return {reinterpret_cast<Storage*>(copy), width, 0, block.keys, 0};
}

// `count` contiguous rows from row j on. Prefetches at their end fetch the next run.
template <typename Storage>
Rows<Storage> run_at(const DecodeHead& at, const Slice& x, int64_t j, int64_t count) {
  const Storage* const data = static_cast<const Storage*>(x.tensor.data);
  const Storage* const from = data + x.offset(j);
  const int64_t stride = x.tensor.stride[2];
  const int64_t tail = std::max<int64_t>(count - kPrefetchRows, 0), next = j + tail + kPrefetchRows;
  const int64_t distance = kPrefetchRows * stride * static_cast<int64_t>(sizeof(Storage));
  if (!x.pages || next >= at.is_live.range.end) return {from, stride, distance, count, 0};
  const auto address = [](const Storage* row) { return reinterpret_cast<intptr_t>(row); };
  return {from, stride, distance, tail,
          address(data + x.offset(next)) - address(from + tail * stride)};
}

// visit(first row, rows, count) for each contiguous run of a block of k or v. The rows are read in
// place if they are made of whole vectors and all may be read; else from a copy.
template <typename Storage, typename Visit>
TK_INLINE void for_each_run(const DecodeHead& at, const Slice& x, const Block& block, bool readable,
                            int64_t width, char* copy, Visit&& visit) {
  const bool in_runs = !x.pages || x.page_size % kRunRows == 0;
  if (!readable || !in_runs || x.tensor.stride[3] != 1 || x.width != width) {
    return visit(0, copy_block<Storage>(at, x, block, width, copy), block.keys);
  }
  for (int64_t r = 0, count; r < block.keys; r += count) {
    count = x.contiguous_rows(block.j0 + r, block.keys - r);
    visit(r, run_at<Storage>(at, x, block.j0 + r, count), count);
  }
}

// Multiplies the scores or weights of a block by the scales of its keys or values. Keys that must
// not be read have the scale 0.
template <typename Real>
void apply_scales(const DecodeHead& at, const Slice& x, const Block& block, bool readable,
                  const DecodeScratch<Real>& t) {
  const float* const data = static_cast<const float*>(x.tensor.data);
  for (int64_t r = 0, count; r < block.keys; r += count) {
    const bool is_live = readable || at.is_live(block.j0 + r);
    count = readable ? x.contiguous_rows(block.j0 + r, block.keys - r) : 1;
    const float* const from = data + (is_live ? x.offset(block.j0 + r) : 0);
    const int64_t stride = x.tensor.stride[2];
    for (int64_t n = 0; n < count; ++n) {
      t.scales[r + n] = is_live ? static_cast<Real>(from[n * stride]) : Real{0};
    }
  }
  Vec<IntOf<Real>> invalid = {};
  for (int64_t r = 0; r < block.keys; r += kLanes<Real>) {
    const Vec<Real> scale = load(t.scales + r);
    invalid |= ~((scale >= 0) & (scale < -kHidden<Real>));
    for (int64_t lane = 0; lane < block.queries; ++lane) {
      Real* const to = t.s + lane * kBlock + r;
      store(to, load(to) * scale);
    }
  }
  if (any<Real>(invalid)) __atomic_store_n(at.p.scales_are_valid, false, __ATOMIC_RELAXED);
}

// Replaces one lane's scores with weights 2^(u (s - m)) and updates m and l. Returns the factor by
// which o must be rescaled. keys is a multiple of two vectors.
template <typename Real>
TK_INLINE Real exponentiate(Real* s, int64_t keys, Real u, Real& m, Real& l) {
  constexpr int64_t W = kLanes<Real>;
  constexpr Real kMinusInfinity = SoftmaxState<Real, kDecodeLanes>::kMinusInfinity;
  const Vec<Real> minus_infinity = broadcast(kMinusInfinity), before = broadcast(m);
  Vec<Real> largest[2] = {minus_infinity, minus_infinity}, sum = {};
  for (int64_t r = 0; r < keys; r += 2 * W) {
    largest[0] = max<Real>(largest[0], load(s + r));
    largest[1] = max<Real>(largest[1], load(s + r + W));
  }
  const Vec<Real> block_max = reduce<Real>(max<Real>(largest[0], largest[1]), max<Real>);
  const Vec<Real> new_max = max<Real>(before, block_max);
  const Vec<Real> shift = new_max == minus_infinity ? Vec<Real>{} : new_max;
  for (int64_t r = 0; r < keys; r += W) {
    const Vec<Real> weight = exp2<Real, Precision::kReal>((load(s + r) - shift) * u);
    sum += weight;
    store(s + r, weight);
  }
  const Vec<Real> factor = exp2<Real, Precision::kReal>((before - shift) * u);
  m = new_max[0];
  l = l * factor[0] + reduce<Real>(sum, [](Vec<Real> a, Vec<Real> b) { return a + b; })[0];
  return factor[0];
}

// Applies mask and score options, in the transposed layout (a query in each lane). `slope` as in
// finish_scores, in that layout too.
template <typename Real>
void finish_transposed(const Problem& p, const Block& block, Real* s, Real* transposed,
                       Real* slope = nullptr) {
  transpose_tile<kDecodeLanes, kBlock>(s, transposed);
  finish_scores<Real, kDecodeLanes>(p, block, transposed, slope);
  transpose_tile<kBlock, kDecodeLanes>(transposed, s);
}

// s (lanes x kBlock) = rows x^T for a block of x, which is k or v; rows: (lanes, width).
template <typename Storage, typename Real>
void multiply_block(const DecodeHead& at, const Slice& x, const Block& block, bool readable,
                    const Real* rows, int64_t width, char* copy, Real* s) {
  for_each_run<Storage>(at, x, block, readable, width, copy,
                        [&](int64_t r, const Rows<Storage>& run, int64_t keys) {
                          for_each_lanes<Real>(block.queries, [&](int64_t lane, auto queries) {
                            multiply_rows<queries()>(run, keys, rows + lane * width, width,
                                                     s + lane * kBlock + r, kBlock);
                          });
                        });
}

// sums (lanes, width) += weights x for a block of x; weights: (lanes x kBlock).
template <typename Storage, typename Real>
void add_block(const DecodeHead& at, const Slice& x, const Block& block, bool readable,
               const Real* weights, int64_t width, char* copy, Real* sums) {
  for_each_run<Storage>(at, x, block, readable, width, copy,
                        [&](int64_t r, const Rows<Storage>& run, int64_t keys) {
                          for_each_lanes<Real>(block.queries, [&](int64_t lane, auto queries) {
                            add_rows<queries()>(run, keys, weights + lane * kBlock + r, kBlock,
                                                sums + lane * width, width, width);
                          });
                        });
}

template <typename Storage, typename Real>
void decode_block(const DecodeHead& at, const DecodeWorkspace<Real>& w,
                  const DecodeScratch<Real>& t, const Block& block, int64_t tile,
                  const Partial<Real>& sums) {
  const Problem& p = at.p;
  const bool readable = all_live(at.is_live, block);
  const Slice k = keys_of(p, p.k, at.b, at.head, p.D), v = keys_of(p, p.v, at.b, at.head, p.D_v);
  multiply_block<Storage>(at, k, block, readable, t.q + tile * w.rows * w.k_width, w.k_width,
                          t.copy, t.s);
  if (p.is_int8) apply_scales(at, keys_of(p, p.k_scale, at.b, at.head, 1), block, readable, t);
  if (needs_finishing(p, block)) finish_transposed(p, block, t.s, t.transposed);

  const Real u = score_unit<Real>(p).log2;
  for (int64_t lane = 0; lane < block.queries; ++lane) {
    const Real factor =
        exponentiate(t.s + lane * kBlock, block.keys, u, sums.state->m[lane], sums.state->l[lane]);
    if (factor == 1) continue;
    for_each_vector(sums.o + lane * w.v_width, w.v_width,
                    [&](Vec<Real> x, int64_t) { return x * factor; });
  }
  if (p.score.dropout_p > 0) {
    dropout_bits<Real, kDecodeLanes>(p, block, t.keep);
    for (int64_t lane = 0; lane < block.queries; ++lane) {
      for (int64_t r = 0; r < block.keys; ++r) {
        if (!(t.keep[r] >> lane & 1)) t.s[lane * kBlock + r] = 0;
      }
    }
  }
  if (p.is_int8) apply_scales(at, keys_of(p, p.v_scale, at.b, at.head, 1), block, readable, t);
  add_block<Storage>(at, v, block, readable, t.s, w.v_width, t.copy, sums.o);
}

// Combines the partial results of two sets of keys into `sums`: docs/attention.md, section 5.
template <typename Real>
void combine(const DecodeWorkspace<Real>& w, int64_t lanes, Real u, const Partial<Real>& sums,
             const Partial<Real>& part) {
  for (int64_t lane = 0; lane < lanes; ++lane) {
    Real &m = sums.state->m[lane], &l = sums.state->l[lane];
    const Real new_max = part.state->m[lane] > m ? part.state->m[lane] : m;
    const Real shift = new_max == sums.state->kMinusInfinity ? Real{0} : new_max;
    const Real share = std::exp2((m - shift) * u);
    const Real part_share = std::exp2((part.state->m[lane] - shift) * u);
    m = new_max;
    l = l * share + part.state->l[lane] * part_share;
    const Real* from = part.o + lane * w.v_width;
    for_each_vector(sums.o + lane * w.v_width, w.v_width, [&](Vec<Real> x, int64_t c) {
      return x * share + load(from + c) * part_share;
    });
  }
}

// Combines the splits and writes o and lse of one tile of queries.
template <typename Storage, typename Real>
void finish_tile(const ForwardParams& p, const DecodeHead& at, const DecodeWorkspace<Real>& w,
                 const LaneTile& tile, Real* row) {
  const int64_t first = w.first_split[at.sequence], last = w.first_split[at.sequence + 1];
  const Partial<Real> sums = w.partial(first, at.head, tile.n);
  const ScoreUnit<Real> unit = score_unit<Real>(p);
  for (int64_t n = first + 1; n < last; ++n) {
    combine(w, tile.lanes, unit.log2, sums, w.partial(n, at.head, tile.n));
  }
  Real lse[kDecodeLanes], rest[kDecodeLanes];
  for (int64_t lane = 0; lane < kDecodeLanes; lane += kLanes<Real>) {
    const Vec<Real> m = load(sums.state->m + lane), l = load(sums.state->l + lane);
    const LogSumExp<Real> x(m, l, Vec<Real>{}, unit);
    store(lse + lane, x.lse);
    store(rest + lane, x.rest);
  }
  for (int64_t lane = 0; lane < tile.lanes; ++lane) {
    const int64_t h = tile.h + lane / p.M, i = tile.i0 + lane % p.M;
    const Real l = sums.state->l[lane];
    const Real share = l == 0 ? Real{0} : keep_factor<Real>(p) / l;
    const Real* o = sums.o + lane * w.v_width;
    for (int64_t c = 0; c < p.D_v; ++c) row[c] = o[converted_index<Storage>(c)] * share;
    write_row(row, p.D_v, Real{1}, p.dtype, p.o.data, row_offset(p.o, at.b, h, i), p.o.stride[3]);
    const int64_t of_row = (at.b * p.H_q + h) * p.lse_stride + i;
    static_cast<Real*>(p.lse)[of_row] = lse[lane];
    if (p.lse_rest) static_cast<Real*>(p.lse_rest)[of_row] = rest[lane];
  }
}

// q (rows x k_width) of one tile, converted to the order of the cache; missing lanes are 0.
template <typename Query, typename Storage, typename Real>
void read_queries(const DecodeHead& at, const DecodeWorkspace<Real>& w, const LaneTile& tile,
                  const DecodeScratch<Real>& t) {
  const Strided& from = at.p.q;
  Query* const row = reinterpret_cast<Query*>(t.copy);
  Real* q = t.q + tile.n * w.rows * w.k_width;
  for (int64_t lane = 0; lane < w.rows; ++lane, q += w.k_width) {
    const bool valid = lane < tile.lanes;
    const int64_t h = tile.h + lane / at.p.M, i = tile.i0 + lane % at.p.M;
    copy_row(static_cast<const Query*>(from.data) + (valid ? row_offset(from, at.b, h, i) : 0),
             from.stride[3], valid ? at.p.D : 0, w.k_width, row);
    if constexpr (kInOrder<Storage>) {
      read_as(row, 1, w.k_width, q);
    } else {
      convert_row(row, w.k_width, q);
    }
  }
}

template <typename Query, typename Storage, typename Real>
void decode_split(const ForwardParams& p, const DecodeHead& at, const DecodeWorkspace<Real>& w,
                  const DecodeScratch<Real>& t, int64_t split) {
  for_each_tile(at, w.tiles, [&](const LaneTile& tile) {
    const Partial<Real> sums = w.partial(split, at.head, tile.n);
    sums.state->clear();
    for (int64_t c = 0; c < w.rows * w.v_width; ++c) sums.o[c] = 0;
    read_queries<Query, Storage>(at, w, tile, t);
  });
  const int64_t first =
      first_block(at.is_live.range) + (split - w.first_split[at.sequence]) * w.split_keys;
  const int64_t last = std::min(first + w.split_keys, at.is_live.range.end);
  for (int64_t j0 = first; j0 < last; j0 += kBlock) {
    for_each_tile(at, w.tiles, [&](const LaneTile& tile) {
      Block block{at.b, tile.h, tile.i0, j0, tile.lanes, p.M, 0, 0, {}, {}};
      clip_to_visible(p, block);
      block.keys += std::exchange(block.first, 0);  // rows are read from the start of the block
      if (block.visible == Visible::kEmpty) return;
      decode_block<Storage>(at, w, t, block, tile.n, w.partial(split, at.head, tile.n));
    });
  }
  // The worker that finishes the last split of a head combines its splits.
  int64_t* const unfinished = w.unfinished + at.sequence * w.heads + at.head;
  if (__atomic_sub_fetch(unfinished, 1, __ATOMIC_ACQ_REL) != 0) return;
  for_each_tile(at, w.tiles,
                [&](const LaneTile& tile) { finish_tile<Storage>(p, at, w, tile, t.row); });
}

template <typename Query, typename Storage>
void decode(const Sequences& all, const Workers& workers, Arena arena) {
  const auto w = lay_out_decode<Storage>(all, workers.count, arena);
  for (int64_t n = 0; n < all.count * w.heads; ++n) {
    w.unfinished[n] = w.first_split[n / w.heads + 1] - w.first_split[n / w.heads];
  }
  // Heads vary fastest: workers that read far apart are faster.
  for_each(workers, w.splits * w.heads, [&](int64_t worker, int64_t item) {
    const int64_t split = item / w.heads, head = item % w.heads;
    const int64_t n =
        std::upper_bound(w.first_split, w.first_split + all.count, split) - w.first_split - 1;
    const ForwardParams& p = all.problem(n);
    const int64_t b = all.entry(n);
    const LiveKeys is_live{visible_key_range(p, b), live_keys_of(p, b, head)};
    const DecodeHead at{p, n, b, head, head * (p.H_q / p.H_kv), is_live};
    Arena own{w.scratch + static_cast<size_t>(worker) * w.scratch_bytes};
    decode_split<Query, Storage>(p, at, w, lay_out_scratch(p, w, own), split);
  });
}

// run(element of q, element of k and v).
template <typename Run>
TK_INLINE auto with_storage(const Problem& p, Run&& run) {
  const auto with_query = [&](auto element) {
    using Real = typename ConvertedRow<decltype(element)>::Real;
    return p.is_int8 ? run(element, Int8<Real>{}) : run(element, element);
  };
  if constexpr (kOnlyBFloat16) {
    return with_query(BFloat16{});
  } else {
    switch (p.dtype) {
      case DType::kFloat16:
        return with_query(Float16{});
      case DType::kBFloat16:
        return with_query(BFloat16{});
      case DType::kFloat32:
        return with_query(float{});
      case DType::kFloat64:
        break;
    }
    return with_query(double{});
  }
}

TK_INLINE size_t decode_workspace(const Sequences& all, const Workers& workers) {
  return with_storage(all.problem(0), [&](auto, auto element) {
    Arena arena;
    lay_out_decode<decltype(element)>(all, workers.count, arena);
    return arena.used;
  });
}

TK_INLINE void run_decode(const Sequences& all, const Workers& workers, Arena arena) {
  with_storage(all.problem(0), [&](auto query, auto element) {
    decode<decltype(query), decltype(element)>(all, workers, arena);
  });
}

}  // namespace tk::cpu::TK_ISA
