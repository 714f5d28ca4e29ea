// Forward for few queries and many keys, as when a model writes text token by token. Its time is
// that of reading k and v: so they are read once, in place and in their own dtype, for all the
// queries that share them.
//
//   for every split of the keys of a key head, for every block of it that is not hidden:
//     s = scores(q k^T)              lanes x keys; a lane is one (head, query) of the group, of
//                                    which there may be several tiles
//     m' = max(m, row max of s)      running maximum
//     p = exp(s - m')
//     l = l exp(m - m') + row sum of p
//     o = o exp(m - m') + dropout(p) v
//   o, lse = the splits' sums, merged in order
//
// Splits begin where the first visible key says, whatever the number of threads; so results do not
// depend on it. Sequences of a cache have each their own number of keys, which may lie in pages:
// then a block is read in stretches of rows that lie together.
// Symbols and derivation: docs/attention.md, sections 1 and 5.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu/attention/decode_rows.h"
#include "cpu/attention/dropout.h"
#include "cpu/attention/softmax.h"
#include "cpu/engine/arena.h"
#include "cpu/engine/workers.h"

namespace tk::cpu::TK_ISA {

constexpr int64_t kDecodeLanes = 16;  // a whole number of vectors in every instruction set
constexpr int64_t kSplitKeys = 512;   // many beside one o, few beside what a worker has to do
constexpr int64_t kStretch = 16;      // rows that lie together come in so many, or are copied
constexpr int64_t kAhead = 16;        // rows from the one that is read to the one that is fetched

// With more queries of a head packed keys (forward.h) are the faster way: docs/cpu.md, section 5.
// Heads that share a key head matter less, for packed each has a block of its own.
TK_INLINE bool is_decoding(const Problem& p) {
  int64_t most = 24;
#if defined(__AMX_BF16__)
  if (p.dtype == DType::kBFloat16) most = 4;
  if (p.dtype == DType::kFloat16) most = p.H_q == p.H_kv ? kDecodeLanes : 8;
#elif !defined(__F16C__)
  if (p.dtype == DType::kFloat16) most = 8;  // rows are widened again for every few queries
#endif
  return p.M > 0 && p.M <= most;
}

// Sequences with the same queries, but keys of their own: entries of one problem, or a problem
// each.
struct Sequences {
  const ForwardParams* problems;
  int64_t count;
  bool together;  // in one problem

  const ForwardParams& problem(int64_t n) const { return together ? *problems : problems[n]; }
  int64_t entry(int64_t n) const { return together ? n : 0; }
};

// The first key that is seen, rounded down to a block's.
TK_INLINE int64_t first_block(KeyInterval seen) { return seen.begin / kBlock * kBlock; }

TK_INLINE int64_t count_splits(KeyInterval seen) {
  const int64_t keys = seen.end - first_block(seen);
  return keys > 0 ? round_up(keys, kSplitKeys) / kSplitKeys : 1;
}

// The queries that share a key head, in tiles of at most kDecodeLanes: whole heads, or queries of
// one.
struct LaneTiles {
  int64_t heads, queries;  // of a tile
  int64_t steps;           // tiles of a head, where those are many
  int64_t count;
};

TK_INLINE LaneTiles lane_tiles(const Problem& p) {
  const auto parts = [](int64_t all, int64_t most) { return (all + most - 1) / most; };
  const int64_t group = p.H_q / p.H_kv;
  // Of block mask blocks a tile must lie in one: kDecodeLanes divides them.
  if (p.M > kDecodeLanes) {
    const int64_t steps = parts(p.M, kDecodeLanes);
    return {1, kDecodeLanes, steps, group * steps};
  }
  const int64_t heads = parts(group, parts(group, kDecodeLanes / p.M));
  return {heads, p.M, 1, parts(group, heads)};
}

// What has been summed over one split of the keys for one tile of queries.
template <typename Real>
struct Partial {
  SoftmaxState<Real, kDecodeLanes>* state;
  Real* o;  // (rows, v_width)
};

template <typename Real>
struct DecodeWorkspace {
  LaneTiles tiles;
  int64_t rows;  // of q and o: a tile's lanes, filled up to what is computed together
  int64_t k_width, v_width;
  int64_t heads;                             // of k
  int64_t splits;                            // of all sequences' keys
  int64_t* first_split;                      // (sequences + 1)
  SoftmaxState<Real, kDecodeLanes>* states;  // (splits, heads, tiles)
  Real* o;                                   // (splits, heads, tiles, rows, v_width)
  int64_t* unfinished;                       // (sequences, heads): splits still to be summed
  char* scratch;                             // (workers), see DecodeScratch
  size_t scratch_bytes;

  Partial<Real> partial(int64_t split, int64_t head, int64_t tile) const {
    const int64_t n = (split * heads + head) * tiles.count + tile;
    return {states + n, o + n * rows * v_width};
  }
};

// One head of k of one sequence.
struct DecodeHead {
  const ForwardParams& p;
  int64_t sequence, b, head;
  int64_t q_head;  // the first of those that share it
  KeyInterval seen;
};

// Lane n is query i0 + n % M of head h + n / M.
struct LaneTile {
  int64_t n, h, i0, lanes;
};

template <typename Visit>
TK_INLINE void for_each_tile(const DecodeHead& at, const LaneTiles& tiles, Visit&& visit) {
  const int64_t group = at.p.H_q / at.p.H_kv;
  for (int64_t n = 0; n < tiles.count; ++n) {
    const int64_t h = n / tiles.steps * tiles.heads, i0 = n % tiles.steps * tiles.queries;
    const int64_t heads = std::min(tiles.heads, group - h);
    visit(LaneTile{n, at.q_head + h, i0, heads * std::min(tiles.queries, at.p.M - i0)});
  }
}

// One worker's, small enough to stay in its cache.
template <typename Real>
struct DecodeScratch {
  Real* q;         // (tiles, rows, k_width)
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
  t.q = take<Real>(arena, w.tiles.count * w.rows * w.k_width);
  t.s = take<Real>(arena, kTileSize);
  t.turned = take<Real>(arena, kTileSize);
  t.keep = take<uint64_t>(arena, p.dropout.p > 0 ? kBlock : 0);
  t.row = take<Real>(arena, w.v_width);
  const int64_t width = std::max(w.k_width, w.v_width);
  t.copy = take<char>(arena, kBlock * width * static_cast<int64_t>(sizeof(Real)));
  return t;
}

template <typename Storage, typename Real = typename Wide<Storage>::Real>
DecodeWorkspace<Real> lay_out_decode(const Sequences& all, int64_t workers, Arena& arena) {
  const ForwardParams& p = all.problem(0);
  DecodeWorkspace<Real> w;
  w.tiles = lane_tiles(p);
  for_each_lanes<Real>(w.tiles.heads * w.tiles.queries,
                       [&](int64_t lane, auto count) { w.rows = lane + count(); });
  w.k_width = round_up(p.D, kChunk<Storage>);
  w.v_width = round_up(p.D_v, kChunk<Storage>);
  w.heads = p.H_kv;
  w.first_split = take<int64_t>(arena, all.count + 1);
  w.splits = 0;
  for (int64_t n = 0; n < all.count; ++n) {
    if (arena.base) w.first_split[n] = w.splits;
    w.splits += count_splits(seen_keys(all.problem(n), all.entry(n)));
  }
  if (arena.base) w.first_split[all.count] = w.splits;
  const int64_t partials = w.splits * w.heads * w.tiles.count;
  w.states = take<SoftmaxState<Real, kDecodeLanes>>(arena, partials);
  w.o = take<Real>(arena, partials * w.rows * w.v_width);
  w.unfinished = take<int64_t>(arena, all.count * w.heads);
  Arena one;
  lay_out_scratch(p, w, one);
  w.scratch_bytes = one.used;
  w.scratch = take<char>(arena, workers * static_cast<int64_t>(one.used));
  return w;
}

// Whether key j may be read.
TK_INLINE bool is_used(const DecodeHead& at, int64_t j) {
  return j >= at.seen.begin && j < at.seen.end &&
         (!at.p.live_keys || at.p.live_keys[at.b * at.p.N + j]);
}

TK_INLINE bool all_used(const DecodeHead& at, const Block& block) {
  if (block.j0 < at.seen.begin || block.j0 + block.keys > at.seen.end) return false;
  uint8_t used = 1;
  for (int64_t j = block.j0; at.p.live_keys && j < block.j0 + block.keys; ++j) {
    used &= at.p.live_keys[at.b * at.p.N + j];
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

// A block of k or v with zeros for what must not be read.
template <typename Storage>
Rows<Storage> copy_block(const DecodeHead& at, const Slice& x, const Block& block, int64_t width,
                         char* copy) {
  const Storage* from = static_cast<const Storage*>(x.tensor.data);
  Storage* to = reinterpret_cast<Storage*>(copy);
  for (int64_t r = 0; r < block.keys; ++r, to += width) {
    const int64_t j = block.j0 + r;
    const bool used = is_used(at, j);
    copy_row(from + (used ? x.offset(j) : 0), x.tensor.stride[3], used ? x.width : 0, width, to);
  }
  return {reinterpret_cast<Storage*>(copy), width, 0, block.keys, 0};
}

// Row j and those that lie together with it; prefetches lead to the next stretch.
template <typename Storage>
Rows<Storage> stretch_at(const DecodeHead& at, const Slice& x, int64_t j, int64_t count) {
  const Storage* const data = static_cast<const Storage*>(x.tensor.data);
  const Storage* const from = data + x.offset(j);
  const int64_t stride = x.tensor.stride[2];
  const int64_t turn = std::max<int64_t>(count - kAhead, 0), next = j + turn + kAhead;
  const int64_t near = kAhead * stride * static_cast<int64_t>(sizeof(Storage));
  if (!x.pages || next >= at.seen.end) return {from, stride, near, count, 0};
  const auto address = [](const Storage* row) { return reinterpret_cast<intptr_t>(row); };
  return {from, stride, near, turn, address(data + x.offset(next)) - address(from + turn * stride)};
}

// visit(first row, rows, how many) for all of a block of k or v: where they lie if they can be read
// in whole chunks and all of them may be read, else from a copy.
template <typename Storage, typename Visit>
TK_INLINE void for_each_stretch(const DecodeHead& at, const Slice& x, const Block& block,
                                bool readable, int64_t width, char* copy, Visit&& visit) {
  const bool in_stretches = !x.pages || x.page_size % kStretch == 0;
  if (!readable || !in_stretches || x.tensor.stride[3] != 1 || x.width != width) {
    return visit(0, copy_block<Storage>(at, x, block, width, copy), block.keys);
  }
  for (int64_t r = 0, count; r < block.keys; r += count) {
    count = x.together(block.j0 + r, block.keys - r);
    visit(r, stretch_at<Storage>(at, x, block.j0 + r, count), count);
  }
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
void decode_block(const DecodeHead& at, const DecodeWorkspace<Real>& w,
                  const DecodeScratch<Real>& t, const Block& block, int64_t tile,
                  const Partial<Real>& sums) {
  const ForwardParams& p = at.p;
  const bool readable = all_used(at, block);
  const Real* const q = t.q + tile * w.rows * w.k_width;
  const auto multiply = [&](int64_t r, const Rows<Storage>& k, int64_t keys) {
    for_each_lanes<Real>(block.queries, [&](int64_t lane, auto queries) {
      multiply_rows<queries()>(k, keys, q + lane * w.k_width, w.k_width, t.s + lane * kBlock + r,
                               kBlock);
    });
  };
  for_each_stretch<Storage>(at, keys_of(p, p.k, at.b, at.head, p.D), block, readable, w.k_width,
                            t.copy, multiply);
  if (is_unfinished(p, block)) finish_turned(p, block, t);

  const Real to_log2 = static_cast<Real>(score_to_log2(p));
  for (int64_t lane = 0; lane < block.queries; ++lane) {
    const Real shrink =
        weigh(t.s + lane * kBlock, block.keys, to_log2, sums.state->m[lane], sums.state->l[lane]);
    if (shrink == 1) continue;
    for_each_vector(sums.o + lane * w.v_width, w.v_width,
                    [&](Vec<Real> x, int64_t) { return x * shrink; });
  }
  if (p.dropout.p > 0) {
    dropout_bits<Real, kDecodeLanes>(p, block, t.keep);
    for (int64_t lane = 0; lane < block.queries; ++lane) {
      for (int64_t r = 0; r < block.keys; ++r) {
        if (!(t.keep[r] >> lane & 1)) t.s[lane * kBlock + r] = 0;
      }
    }
  }
  const auto add = [&](int64_t r, const Rows<Storage>& v, int64_t keys) {
    for_each_lanes<Real>(block.queries, [&](int64_t lane, auto queries) {
      add_rows<queries()>(v, keys, t.s + lane * kBlock + r, kBlock, sums.o + lane * w.v_width,
                          w.v_width, w.v_width);
    });
  };
  for_each_stretch<Storage>(at, keys_of(p, p.v, at.b, at.head, p.D_v), block, readable, w.v_width,
                            t.copy, add);
}

// sums += part, of two sets of keys: docs/attention.md, section 5.
template <typename Real>
void merge(const DecodeWorkspace<Real>& w, int64_t lanes, const Partial<Real>& sums,
           const Partial<Real>& part) {
  for (int64_t lane = 0; lane < lanes; ++lane) {
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

// Writes o and lse of one tile of queries.
template <typename Storage, typename Real>
void finish_tile(const DecodeHead& at, const DecodeWorkspace<Real>& w, const LaneTile& tile,
                 Real* row) {
  const ForwardParams& p = at.p;
  const int64_t first = w.first_split[at.sequence], last = w.first_split[at.sequence + 1];
  const Partial<Real> sums = w.partial(first, at.head, tile.n);
  for (int64_t n = first + 1; n < last; ++n) {
    merge(w, tile.lanes, sums, w.partial(n, at.head, tile.n));
  }
  Real lse[kDecodeLanes];
  for (int64_t lane = 0; lane < kDecodeLanes; lane += kLanes<Real>) {
    store(lse + lane, sums.state->lse(lane));
  }
  for (int64_t lane = 0; lane < tile.lanes; ++lane) {
    const int64_t h = tile.h + lane / p.M, i = tile.i0 + lane % p.M;
    const Real l = sums.state->l[lane];
    const Real share = l == 0 ? Real{0} : keep_factor<Real>(p) / l;
    const Real* o = sums.o + lane * w.v_width;
    for (int64_t c = 0; c < p.D_v; ++c) row[c] = o[place<Storage>(c)] * share;
    write_row(row, p.D_v, Real{1}, p.dtype, p.o.data, row_offset(p.o, at.b, h, i), p.o.stride[3]);
    static_cast<Real*>(p.lse)[(at.b * p.H_q + h) * p.lse_stride + i] = lse[lane];
  }
}

// q (rows x k_width) of one tile's queries, 0 where there is none.
template <typename Storage, typename Real>
void read_queries(const DecodeHead& at, const DecodeWorkspace<Real>& w, const LaneTile& tile,
                  Storage* row, Real* q) {
  const Strided& from = at.p.q;
  for (int64_t lane = 0; lane < w.rows; ++lane, q += w.k_width) {
    const bool known = lane < tile.lanes;
    const int64_t h = tile.h + lane / at.p.M, i = tile.i0 + lane % at.p.M;
    copy_row(static_cast<const Storage*>(from.data) + (known ? row_offset(from, at.b, h, i) : 0),
             from.stride[3], known ? at.p.D : 0, w.k_width, row);
    widen(row, w.k_width, q);
  }
}

template <typename Storage, typename Real>
void decode_split(const DecodeHead& at, const DecodeWorkspace<Real>& w,
                  const DecodeScratch<Real>& t, int64_t split) {
  const ForwardParams& p = at.p;
  for_each_tile(at, w.tiles, [&](const LaneTile& tile) {
    const Partial<Real> sums = w.partial(split, at.head, tile.n);
    sums.state->clear();
    for (int64_t c = 0; c < w.rows * w.v_width; ++c) sums.o[c] = 0;
    read_queries(at, w, tile, reinterpret_cast<Storage*>(t.copy),
                 t.q + tile.n * w.rows * w.k_width);
  });
  const int64_t first = first_block(at.seen) + (split - w.first_split[at.sequence]) * kSplitKeys;
  const int64_t last = std::min(first + kSplitKeys, at.seen.end);
  for (int64_t j0 = first; j0 < last; j0 += kBlock) {
    for_each_tile(at, w.tiles, [&](const LaneTile& tile) {
      Block block{at.b, tile.h, tile.i0, j0, tile.lanes, p.M, 0, 0, {}, {}};
      look(p, block);
      block.keys += std::exchange(block.first, 0);  // rows are read from the block's first
      if (block.visible == Visible::kNone) return;
      decode_block<Storage>(at, w, t, block, tile.n, w.partial(split, at.head, tile.n));
    });
  }
  // Whoever sums a head's last split finishes the head.
  int64_t* const unfinished = w.unfinished + at.sequence * w.heads + at.head;
  if (__atomic_sub_fetch(unfinished, 1, __ATOMIC_ACQ_REL) != 0) return;
  for_each_tile(at, w.tiles,
                [&](const LaneTile& tile) { finish_tile<Storage>(at, w, tile, t.row); });
}

template <typename Storage>
void decode(const Sequences& all, const Workers& workers, Arena arena) {
  const auto w = lay_out_decode<Storage>(all, workers.count, arena);
  for (int64_t n = 0; n < all.count * w.heads; ++n) {
    w.unfinished[n] = w.first_split[n / w.heads + 1] - w.first_split[n / w.heads];
  }
  // Heads first: workers that read far apart are faster.
  for_each(workers, w.splits * w.heads, [&](int64_t worker, int64_t item) {
    const int64_t split = item / w.heads, head = item % w.heads;
    const int64_t n =
        std::upper_bound(w.first_split, w.first_split + all.count, split) - w.first_split - 1;
    const ForwardParams& p = all.problem(n);
    const int64_t b = all.entry(n);
    const DecodeHead at{p, n, b, head, head * (p.H_q / p.H_kv), seen_keys(p, b)};
    Arena own{w.scratch + static_cast<size_t>(worker) * w.scratch_bytes};
    decode_split<Storage>(at, w, lay_out_scratch(p, w, own), split);
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

TK_INLINE size_t decode_workspace(const Sequences& all, const Workers& workers) {
  return with_storage(all.problem(0).dtype, [&](auto element) {
    Arena arena;
    lay_out_decode<decltype(element)>(all, workers.count, arena);
    return arena.used;
  });
}

TK_INLINE void run_decode(const Sequences& all, const Workers& workers, Arena arena) {
  with_storage(all.problem(0).dtype,
               [&](auto element) { decode<decltype(element)>(all, workers, arena); });
}

}  // namespace tk::cpu::TK_ISA
