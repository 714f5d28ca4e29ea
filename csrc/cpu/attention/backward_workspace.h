// Workspace of the backward pass: packed operands, row statistics and gradient accumulators.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu/attention/delta.h"
#include "cpu/attention/relative_keys.h"

namespace tk::cpu::TK_ISA {

// Queries are processed in chunks whose operands and dq stay in L2 while all keys pass.
constexpr size_t kQueryChunkBytes = 768 << 10;

// If workers share heads, they process the queries in phases of whole chunks. The operands and dq
// of a phase have this size per worker: small enough for an L3 cache, large enough that workers
// seldom wait for each other, which is expensive where other processes share the cores.
constexpr int64_t kQueryPhaseBytes = 8 << 20;

// A slot holds one key head and the query heads that share it.
template <typename Engine>
struct BackwardWorkspace {
  using Real = typename Engine::Real;
  PanelLayout k, v, q, d_o;
  DistancePanels distances;
  int64_t key_blocks;
  int64_t query_blocks;  // of all query heads that share a key head
  int64_t head_blocks;   // of one query head
  int64_t splits, chunk;
  int64_t stripe;          // key blocks that pass before the next queries
  bool own_heads;          // one worker processes a whole key head, in its own slot
  int64_t query_capacity;  // query blocks that a slot holds at a time: a chunk, a phase, or all
  char* k_panels;          // (slots, key_blocks)
  char* v_panels;          // (slots, key_blocks)
  char* q_panels;          // (slots, query_capacity)
  char* do_panels;         // (slots, query_capacity)
  Real* lse;               // (slots, query_capacity, kBlock); inf for fully masked rows and past M
  Real* lse_rest;          // (slots, query_capacity, kBlock): the rounding error of lse
  Real* delta;             // (slots, query_capacity, kBlock): delta - dlse
  Real* dq;                // (slots, splits, query_capacity, D, kBlock)
  Real* dk;                // (slots, key_blocks, kBlock, D)
  Real* dv;                // (slots, key_blocks, kBlock, D_v)
  Real* diagonals;  // (slots, splits, heads of a group, padded_distances): relative_gradient.h
  int64_t padded_distances;  // M + N - 1, and a block before and after them
  Real* dkeys;               // (slots, splits, heads of a group, panels, kKeyGroup, D)
  char* scratch;             // (workers), see BackwardScratch
  size_t scratch_bytes;
  bool* finite;

  // Index of query block m in a slot, and its dq in one split.
  int64_t query_index(int64_t slot, int64_t m) const {
    return slot * query_capacity + m % query_capacity;
  }
  // Query head of block m, whose key head is `head`, which counts over the batch.
  int64_t query_head(const Problem& p, int64_t head, int64_t m) const {
    return head % p.H_kv * (p.H_q / p.H_kv) + m / head_blocks;
  }
  Real* dq_of(int64_t slot, int64_t split, int64_t m) const {
    return dq + query_index(slot * splits + split, m) * kBlock * k.width;
  }

  // Sums by distance of one split, for one query head of the group.
  Real* diagonals_of(int64_t slot, int64_t split, int64_t h) const {
    return diagonals +
           ((slot * splits + split) * (query_blocks / head_blocks) + h) * padded_distances;
  }

  // Gradient of the keys by distance of one split, for one query head of the group.
  int64_t dkeys_size() const { return distances.count * kKeyGroup * distances.layout.width; }
  Real* dkeys_of(int64_t slot, int64_t split, int64_t h) const {
    return dkeys + ((slot * splits + split) * (query_blocks / head_blocks) + h) * dkeys_size();
  }

  // First and last query block of a slot that overlaps `queries`, clipped to existing blocks.
  std::pair<int64_t, int64_t> block_span(QueryInterval queries) const {
    const auto block = [&](int64_t i) {
      return std::clamp<int64_t>(i / kBlock, 0, head_blocks - 1);
    };
    const int64_t first = block(queries.begin);
    const int64_t last = query_blocks - head_blocks + block(queries.end - 1);
    return {first, std::max(first, last)};
  }
  // True if query blocks m0 .. m1 - 1 of a slot, which belong to one or two heads, overlap
  // `queries`.
  bool overlaps(QueryInterval queries, int64_t m0, int64_t m1) const {
    const int64_t first = m0 % head_blocks, last = (m1 - 1) % head_blocks;
    return first > last || (first * kBlock < queries.end && (last + 1) * kBlock > queries.begin);
  }

  const char* k_panel(int64_t slot, int64_t n) const {
    return at(k_panels, k, slot * key_blocks + n);
  }
  const char* v_panel(int64_t slot, int64_t n) const {
    return at(v_panels, v, slot * key_blocks + n);
  }
  const char* q_panel(int64_t slot, int64_t m) const {
    return at(q_panels, q, query_index(slot, m));
  }
  const char* do_panel(int64_t slot, int64_t m) const {
    return at(do_panels, d_o, query_index(slot, m));
  }

  static char* at(char* panels, const PanelLayout& layout, int64_t n) {
    return panels + static_cast<size_t>(n) * layout.bytes;
  }
};

// Gradients of a group of queries by distance; scratch of one worker. The last panel of a tile's
// band is completed by the tile of the next keys, and kept in `carry`.
template <typename Real>
struct GradientBands {
  Real* ds;     // (kBlock, kBlock): the gradient of a tile's scores, keys x queries
  Real* dg;     // (kKeyGroup, kBand)
  Real* carry;  // (groups, kKeyGroup, kKeyGroup)
  char* panel;  // of dg
};

// Layout of dg, for the products with the packed queries and keys by distance.
template <typename Engine>
PanelLayout band_layout() {
  return Engine::layout(kRightT | kLeftT, kKeyGroup, kBand);
}

// Scratch of one worker, small enough for its L1 and L2. Holds kSquare x kSquare tiles of weights
// and of gradients.
template <typename Engine>
struct BackwardScratch {
  using Real = typename Engine::Real;
  using Weights = typename Engine::template Tile<kLeft, kBlock, kBlock>;
  using Gradient = typename Engine::template Tile<kLeft | kRight, kBlock, kBlock>;
  static constexpr int64_t kTiles = Engine::kSquare * Engine::kSquare;
  Real* s;            // (kBlock, kPass)
  Real* dp;           // (kBlock, kPass)
  char* weights;      // kTiles tiles of type Weights
  char* gradient;     // kTiles tiles of type Gradient
  uint64_t* keep;     // (kBlock), only with dropout
  Real* ds;           // (2, kBlock, kBlock), only with dbias: keys x queries, then transposed
  Real* slope;        // (kBlock, kPass), only with is_capped
  Real* diagonals;    // (2 kBlock), only with distance_sums: ds of a tile summed by distance
  Bands<Real> bands;  // only with relative keys; `held` of kSquare query blocks
  GradientBands<Real> dbands;  // only with relative keys; `carry` of kSquare query blocks
  Real* rows;                  // (kBlock, D or D_v), for packing
  Real* o_rows;                // (kBlock, D_v), for delta
  Cursors* cursors;            // (chunk), only with selected keys

  // The bands of query block m from query `lane` on.
  Bands<Real> bands_of(int64_t m, int64_t lane) const {
    return {bands.g, bands.held + (m % Engine::kSquare * kBlock + lane) * kKeyGroup};
  }
  Real* carry_of(int64_t m, int64_t lane) const {
    return dbands.carry + (m % Engine::kSquare * kBlock + lane) * kKeyGroup;
  }
};

template <typename Engine>
BackwardScratch<Engine> lay_out_scratch(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                                        Arena& arena) {
  using Real = typename Engine::Real;
  using Scratch = BackwardScratch<Engine>;
  constexpr int64_t kTileSize = kBlock * kBlock, kPassSize = kBlock * Engine::kPass;
  constexpr int64_t kTiles = Scratch::kTiles;
  Scratch t;
  t.s = allocate<Real>(arena, kPassSize);
  t.dp = allocate<Real>(arena, kPassSize);
  t.weights = allocate<char>(arena, kTiles * static_cast<int64_t>(Scratch::Weights::kBytes));
  t.gradient = allocate<char>(arena, kTiles * static_cast<int64_t>(Scratch::Gradient::kBytes));
  t.ds = allocate<Real>(arena, p.dbias.data ? 2 * kTileSize : 0);
  t.keep = allocate<uint64_t>(arena, p.score.dropout_p > 0 ? kBlock : 0);
  t.slope = allocate<Real>(arena, is_capped(p) ? kPassSize : 0);
  t.diagonals = allocate<Real>(arena, p.distance_sums ? 2 * kBlock : 0);
  if (w.distances) {
    constexpr int64_t kHeld = Engine::kSquare * kBlock * kKeyGroup;
    t.bands = {allocate<Real>(arena, kKeyGroup * kBand), allocate<Real>(arena, kHeld)};
    t.dbands = {allocate<Real>(arena, kTileSize), allocate<Real>(arena, kKeyGroup * kBand),
                allocate<Real>(arena, kHeld),
                allocate<char>(arena, static_cast<int64_t>(band_layout<Engine>().bytes))};
  }
  t.rows = allocate<Real>(arena, kBlock * std::max(w.k.width, w.v.width));
  t.o_rows = allocate<Real>(arena, kBlock * w.v.width);
  t.cursors = allocate<Cursors>(arena, p.mask.selected ? w.chunk : 0);
  return t;
}

// Splits the keys so that few heads still occupy every worker. Each split has its own dq.
TK_INLINE int64_t choose_splits(int64_t heads, int64_t workers, int64_t stripes) {
  constexpr int64_t kItemsPerWorker = 2;  // enough for workers to finish at about the same time
  if (heads == 0 || workers == 1 || heads >= workers * kItemsPerWorker) return 1;
  const int64_t wanted = (workers * kItemsPerWorker + heads - 1) / heads;
  return std::max<int64_t>(1, std::min(wanted, stripes));
}

// True if the bias has one element per weight: its gradient is then ds itself.
TK_INLINE bool writes_ds(const BackwardParams& p) {
  const int64_t* size = p.bias_size;
  return p.dbias.data && size[0] == p.B && size[1] == p.H_q && size[2] == p.M && size[3] == p.N;
}

// Query blocks that a slot holds at a time. The separate bias gradient pass reads all of them.
template <typename Engine>
int64_t choose_query_capacity(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                              int64_t workers, int64_t slots, size_t dq_bytes) {
  if (w.own_heads) return std::min(w.chunk, w.query_blocks);
  if (p.dbias.data && !writes_ds(p)) return w.query_blocks;
  const size_t block_bytes = w.q.bytes + w.d_o.bytes + static_cast<size_t>(w.splits) * dq_bytes;
  const int64_t chunk_bytes = w.chunk * static_cast<int64_t>(block_bytes);
  const int64_t chunks = workers * kQueryPhaseBytes / (std::max<int64_t>(1, slots) * chunk_bytes);
  return std::min(std::max<int64_t>(1, chunks) * w.chunk, std::max<int64_t>(1, w.query_blocks));
}

template <typename Engine>
BackwardWorkspace<Engine> lay_out_backward(const BackwardParams& p, int64_t workers, Arena& arena) {
  using Real = typename Engine::Real;
  BackwardWorkspace<Engine> w;
  w.k = Engine::layout(kLeft | kLeftT, panel_rows(p.N), p.D);
  w.v = Engine::layout(kLeft, panel_rows(p.N), p.D_v);
  const unsigned rows_of_q = p.score.relative_keys ? unsigned{kLeft} : 0;
  w.q = Engine::layout(kRight | kRightT | rows_of_q, panel_rows(p.M), p.D);
  w.d_o = Engine::layout(kRight | kRightT, panel_rows(p.M), p.D_v);
  w.key_blocks = round_up(p.N, kBlock) / kBlock;
  w.head_blocks = round_up(p.M, kBlock) / kBlock;
  w.query_blocks = p.H_q / p.H_kv * w.head_blocks;
  const int64_t heads = p.B * p.H_kv;
  // The separate bias gradient pass reads the operands of every head.
  w.own_heads = can_own_heads(heads, workers) && (!p.dbias.data || writes_ds(p));
  // Bands of neighbouring key blocks overlap: relative_keys.h.
  constexpr int64_t kLongStripe = 4;
  w.stripe = p.score.relative_keys ? kLongStripe : Engine::kSquare;
  const int64_t stripes = round_up(w.key_blocks, w.stripe) / w.stripe;
  w.splits = w.own_heads ? 1 : choose_splits(heads, workers, stripes);
  const int64_t slots = w.own_heads ? workers : heads;
  const size_t dq_bytes = static_cast<size_t>(kBlock * w.k.width) * sizeof(Real);
  w.chunk =
      std::max<int64_t>(Engine::kSquare, kQueryChunkBytes / (w.q.bytes + w.d_o.bytes + dq_bytes));
  w.query_capacity = choose_query_capacity(p, w, workers, slots, dq_bytes);
  const int64_t queries = slots * w.query_capacity, keys = slots * w.key_blocks;
  w.k_panels = allocate<char>(arena, keys * static_cast<int64_t>(w.k.bytes));
  w.v_panels = allocate<char>(arena, keys * static_cast<int64_t>(w.v.bytes));
  w.q_panels = allocate<char>(arena, queries * static_cast<int64_t>(w.q.bytes));
  w.do_panels = allocate<char>(arena, queries * static_cast<int64_t>(w.d_o.bytes));
  w.lse = allocate<Real>(arena, queries * kBlock);
  w.lse_rest = allocate<Real>(arena, queries * kBlock);
  w.delta = allocate<Real>(arena, queries * kBlock);
  w.dq = allocate<Real>(arena, w.splits * queries * kBlock * w.k.width);
  w.dk = allocate<Real>(arena, keys * kBlock * w.k.width);
  w.dv = allocate<Real>(arena, keys * kBlock * w.v.width);
  w.padded_distances = p.M + p.N - 1 + 2 * kBlock;
  w.diagonals = allocate<Real>(
      arena, p.distance_sums ? slots * w.splits * (p.H_q / p.H_kv) * w.padded_distances : 0);
  w.distances = lay_out_distances<Engine>(p, kRightT | kLeftT, arena);
  w.dkeys =
      allocate<Real>(arena, p.key_sums ? slots * w.splits * (p.H_q / p.H_kv) * w.dkeys_size() : 0);
  Arena one;
  lay_out_scratch(p, w, one);
  w.scratch_bytes = one.used;
  w.scratch = allocate<char>(arena, workers * static_cast<int64_t>(one.used));
  w.finite = allocate<bool>(arena, 1);
  return w;
}

template <typename Engine>
BackwardScratch<Engine> scratch_of(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                                   int64_t worker) {
  Arena arena{w.scratch + static_cast<size_t>(worker) * w.scratch_bytes};
  return lay_out_scratch(p, w, arena);
}

// Packs key block n of `head`, which counts over the batch, unless it is fully masked.
template <typename Engine>
void pack_keys_backward(const BackwardParams& p, const BackwardWorkspace<Engine>& w, int64_t worker,
                        int64_t slot, int64_t head, int64_t n) {
  const int64_t b = head / p.H_kv, h = head % p.H_kv, item = slot * w.key_blocks + n;
  const LiveKeys is_live{visible_key_range(p, b), live_keys_of(p, b, h)};
  if (!overlaps(is_live.range, n)) return;
  auto* rows = scratch_of(p, w, worker).rows;
  pack_panel<Engine>(w.k, Slice{p.dtype, p.k, b, h, p.N, p.D}, n * kBlock, is_live, rows,
                     w.at(w.k_panels, w.k, item), w.finite);
  pack_panel<Engine>(w.v, Slice{p.dtype, p.v, b, h, p.N, p.D_v}, n * kBlock, is_live, rows,
                     w.at(w.v_panels, w.v, item), w.finite);
}

// Packs query block m of key head `head`. Fully masked rows have lse = -inf; their q and do become
// zero, whatever they hold.
template <typename Engine>
void pack_queries_backward(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                           int64_t worker, int64_t slot, int64_t head, int64_t m) {
  using Real = typename Engine::Real;
  constexpr Real kMinusInfinity = -static_cast<Real>(__builtin_inf());
  const int64_t b = head / p.H_kv, i0 = m % w.head_blocks * kBlock;
  const int64_t h = w.query_head(p, head, m);
  const int64_t row0 = (b * p.H_q + h) * p.lse_stride, item = w.query_index(slot, m);
  const Real* lse = static_cast<const Real*>(p.lse) + row0;
  const Real* lse_rest = static_cast<const Real*>(p.lse_rest) + row0;
  const Real* dlse = p.dlse ? static_cast<const Real*>(p.dlse) + row0 : nullptr;
  const auto is_live = [&](int64_t i) { return lse[i] != kMinusInfinity; };
  const BackwardScratch<Engine> t = scratch_of(p, w, worker);
  pack_panel<Engine>(w.q, Slice{p.dtype, p.q, b, h, p.M, p.D}, i0, is_live, t.rows,
                     w.at(w.q_panels, w.q, item), w.finite);
  const Slice o{p.dtype, p.o, b, h, p.M, p.D_v}, d_o{p.dtype, p.d_o, b, h, p.M, p.D_v};
  pack_panel<Engine>(w.d_o, d_o, i0, is_live, t.rows, w.at(w.do_panels, w.d_o, item), w.finite);
  row_dots(d_o, o, i0, w.d_o.rows, w.d_o.width, is_live, t.rows, t.o_rows, w.delta + item * kBlock);
  for (int64_t r = 0; r < w.q.rows; ++r) {
    const bool valid = i0 + r < p.M && is_live(i0 + r);
    if (dlse && valid) w.delta[item * kBlock + r] -= dlse[i0 + r];
    // Other rows have p = 0, whatever a bias adds to their scores.
    w.lse[item * kBlock + r] = valid ? lse[i0 + r] : -kMinusInfinity;
    w.lse_rest[item * kBlock + r] = valid ? lse_rest[i0 + r] : Real{0};
  }
}

}  // namespace tk::cpu::TK_ISA
