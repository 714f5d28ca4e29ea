// Tiles, splits and memory of a decoding call (decode.h).
#pragma once

#include <algorithm>
#include <utility>

#include "cpu/attention/decode_rows.h"
#include "cpu/attention/softmax.h"
#include "cpu/engine/arena.h"

namespace tk::cpu::TK_ISA {

constexpr int64_t kDecodeLanes = 16;  // a whole number of vectors in every instruction set
constexpr int64_t kSplitKeys = 512;   // large next to one o, small next to the work of one thread

// Above this number of queries per head the packed path (forward.h) is faster: docs/cpu.md, section
// 5. Sharing of key heads matters less: the packed path uses a block per query head.
TK_INLINE bool is_decoding(const Problem& p) {
  int64_t max_queries = 24;
#if defined(__AMX_BF16__)
  if (p.dtype == DType::kBFloat16) max_queries = 4;
  if (p.dtype == DType::kFloat16) max_queries = p.H_q == p.H_kv ? kDecodeLanes : 8;
#elif defined(__AVX512BF16__)
  max_queries = 12;
#elif !defined(__F16C__)
  if (p.dtype == DType::kFloat16)
    max_queries = 8;  // rows are converted again for every few queries
#endif
  return p.is_int8 || (p.M > 0 && p.M <= max_queries && !p.score.relative_keys);
}

// Sequences with the same queries but different keys: batch entries of one problem, or one problem
// each.
struct Sequences {
  const ForwardParams* problems;
  int64_t count;
  bool batched;  // batch entries of one problem

  const ForwardParams& problem(int64_t n) const { return batched ? *problems : problems[n]; }
  int64_t entry(int64_t n) const { return batched ? n : 0; }
};

// First visible key, rounded down to a block boundary.
TK_INLINE int64_t first_block(KeyInterval key_range) { return key_range.begin / kBlock * kBlock; }

// Tiling of the queries that share a key head. A tile has at most kDecodeLanes lanes: whole heads,
// or part of one head's queries.
struct LaneTiles {
  int64_t heads, queries;  // per tile
  int64_t steps;           // tiles per head, if one head needs several
  int64_t count;
};

TK_INLINE LaneTiles lane_tiles(const Problem& p) {
  const auto ceil_div = [](int64_t count, int64_t unit) { return (count + unit - 1) / unit; };
  const int64_t group = p.H_q / p.H_kv;
  // A tile must not cross a block mask boundary: kDecodeLanes divides kBlockMaskSize.
  if (p.M > kDecodeLanes) {
    const int64_t steps = ceil_div(p.M, kDecodeLanes);
    return {1, kDecodeLanes, steps, group * steps};
  }
  const int64_t heads = ceil_div(group, ceil_div(group, kDecodeLanes / p.M));
  return {heads, p.M, 1, ceil_div(group, heads)};
}

// True if the backward pass sums scores as decoding does (backward_rows.h): the queries of a key
// head are one tile, and no option has a gradient.
TK_INLINE bool decodes_backward(const Problem& p) {
  const bool has_table = p.score.bias.data || p.score.relative_bias;
  return is_decoding(p) && p.N > 0 && !has_table && lane_tiles(p).count == 1;
}

// Keys of a split. Those of many queries are longer, or the partial results would outgrow the keys.
TK_INLINE int64_t split_keys(const LaneTiles& tiles) {
  constexpr int64_t kTiles = 8;
  return kSplitKeys * ((tiles.count + kTiles - 1) / kTiles);
}

TK_INLINE int64_t count_splits(KeyInterval key_range, int64_t split_keys) {
  const int64_t keys = key_range.end - first_block(key_range);
  return keys > 0 ? round_up(keys, split_keys) / split_keys : 1;
}

// Partial result of one split of the keys for one tile of queries.
template <typename Real>
struct Partial {
  SoftmaxState<Real, kDecodeLanes>* state;
  Real* o;  // (rows, v_width)
};

template <typename Real>
struct DecodeWorkspace {
  LaneTiles tiles;
  int64_t split_keys;
  int64_t rows;  // of q and o: the lanes of a tile, rounded up to the unit of computation
  int64_t k_width, v_width;
  int64_t heads;                             // key heads
  int64_t splits;                            // of all sequences
  int64_t* first_split;                      // (sequences + 1)
  SoftmaxState<Real, kDecodeLanes>* states;  // (splits, heads, tiles)
  Real* o;                                   // (splits, heads, tiles, rows, v_width)
  int64_t* unfinished;                       // (sequences, heads): splits not yet finished
  char* scratch;                             // (workers), see DecodeScratch
  size_t scratch_bytes;

  Partial<Real> partial(int64_t split, int64_t head, int64_t tile) const {
    const int64_t n = (split * heads + head) * tiles.count + tile;
    return {states + n, o + n * rows * v_width};
  }
};

// One key head of one sequence.
struct DecodeHead {
  const Problem& p;
  int64_t sequence, b, head;
  int64_t q_head;  // the first query head that shares it
  LiveKeys is_live;
};

// Lane n holds query i0 + n % M of head h + n / M.
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

// Scratch of one worker, small enough for its L1 and L2.
template <typename Real>
struct DecodeScratch {
  Real* q;           // (tiles, rows, k_width)
  Real* s;           // (kDecodeLanes, kBlock), of which `rows` are computed
  Real* transposed;  // (kBlock, kDecodeLanes): s in the layout of finish_scores
  uint64_t* keep;    // (kBlock), only with dropout
  Real* row;         // (v_width)
  Real* scales;      // (kBlock), only of an int8 cache
  char* copy;        // (kBlock, k_width or v_width): a block that cannot be read in place
};

// visit(first lane, number of lanes as a constant), until `lanes` are covered.
template <typename Real, typename Visit>
TK_INLINE void for_each_lanes(int64_t lanes, Visit&& visit) {
  constexpr int kMaxLanes = kLanes<Real> < 4 ? kLanes<Real> : 4;  // registers hold no more
  int64_t lane = 0;
  for (; lanes - lane > 2; lane += kMaxLanes) visit(lane, std::integral_constant<int, kMaxLanes>());
  if (lanes - lane == 2) visit(lane, std::integral_constant<int, 2>());
  if (lanes - lane == 1) visit(lane, std::integral_constant<int, 1>());
}

template <typename Real>
DecodeScratch<Real> lay_out_scratch(const ForwardParams& p, const DecodeWorkspace<Real>& w,
                                    Arena& arena) {
  constexpr int64_t kTileSize = kBlock * kDecodeLanes;
  DecodeScratch<Real> t;
  t.q = allocate<Real>(arena, w.tiles.count * w.rows * w.k_width);
  t.s = allocate<Real>(arena, kTileSize);
  t.transposed = allocate<Real>(arena, kTileSize);
  t.keep = allocate<uint64_t>(arena, p.score.dropout_p > 0 ? kBlock : 0);
  t.row = allocate<Real>(arena, w.v_width);
  t.scales = allocate<Real>(arena, p.is_int8 ? kBlock : 0);
  const int64_t width = std::max(w.k_width, w.v_width);
  t.copy = allocate<char>(arena, kBlock * width * static_cast<int64_t>(sizeof(Real)));
  return t;
}

template <typename Storage, typename Real = typename ConvertedRow<Storage>::Real>
DecodeWorkspace<Real> lay_out_decode(const Sequences& all, int64_t workers, Arena& arena) {
  const ForwardParams& p = all.problem(0);
  DecodeWorkspace<Real> w;
  w.tiles = lane_tiles(p);
  w.split_keys = split_keys(w.tiles);
  for_each_lanes<Real>(w.tiles.heads * w.tiles.queries,
                       [&](int64_t lane, auto count) { w.rows = lane + count(); });
  w.k_width = round_up(p.D, kChunk<Storage>);
  w.v_width = round_up(p.D_v, kChunk<Storage>);
  w.heads = p.H_kv;
  w.first_split = allocate<int64_t>(arena, all.count + 1);
  w.splits = 0;
  for (int64_t n = 0; n < all.count; ++n) {
    if (arena.base) w.first_split[n] = w.splits;
    w.splits += count_splits(visible_key_range(all.problem(n), all.entry(n)), w.split_keys);
  }
  if (arena.base) w.first_split[all.count] = w.splits;
  const int64_t partials = w.splits * w.heads * w.tiles.count;
  w.states = allocate<SoftmaxState<Real, kDecodeLanes>>(arena, partials);
  w.o = allocate<Real>(arena, partials * w.rows * w.v_width);
  w.unfinished = allocate<int64_t>(arena, all.count * w.heads);
  Arena one;
  lay_out_scratch(p, w, one);
  w.scratch_bytes = one.used;
  w.scratch = allocate<char>(arena, workers * static_cast<int64_t>(one.used));
  return w;
}

}  // namespace tk::cpu::TK_ISA
