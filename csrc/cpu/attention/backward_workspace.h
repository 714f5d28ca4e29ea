// What the backward pass works on: packed operands, statistics and gradients that are being summed.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu/attention/delta.h"
#include "cpu/attention/scores.h"
#include "cpu/engine/arena.h"
#include "cpu/engine/workers.h"

namespace tk::cpu::TK_ISA {

// Queries are taken a chunk at a time, whose operands and dq stay in the second-level cache while
// the keys pass by.
constexpr size_t kQueryChunkBytes = 768 << 10;

// A place holds one head of k, and the heads of q that share it.
template <typename Engine>
struct BackwardWorkspace {
  using Real = typename Engine::Real;
  PanelLayout k, v, q, d_o;
  int64_t key_blocks;
  int64_t query_blocks;  // of all heads of q that share a head of k
  int64_t head_blocks;   // of one of them
  int64_t splits, chunk;
  bool own_heads;       // a worker takes whole heads of k, and has a place for one
  int64_t query_rooms;  // blocks of queries of a head that are there at a time: a chunk, or all
  char* k_panels;       // (places, key_blocks)
  char* v_panels;       // (places, key_blocks)
  char* q_panels;       // (places, query_rooms)
  char* do_panels;      // (places, query_rooms)
  Real* lse;      // (places, query_rooms, 2, kBlock): in powers of two, and what was rounded away;
                  // 0 for rows without one
  Real* delta;    // (places, query_rooms, kBlock): delta - dlse
  Real* dq;       // (places, splits, query_rooms, D, kBlock)
  Real* dk;       // (places, key_blocks, kBlock, D)
  Real* dv;       // (places, key_blocks, kBlock, D_v)
  char* scratch;  // (workers), see BackwardScratch
  size_t scratch_bytes;
  bool* finite;

  // Where block m of a place's queries is, and its dq of one split.
  int64_t query_room(int64_t place, int64_t m) const {
    return place * query_rooms + m % query_rooms;
  }
  Real* dq_of(int64_t place, int64_t split, int64_t m) const {
    return dq + query_room(place * splits + split, m) * kBlock * k.width;
  }

  // The first and the last block of a place's queries that hold some of these, or would.
  std::pair<int64_t, int64_t> span(QueryInterval queries) const {
    const auto block = [&](int64_t i) {
      return std::clamp<int64_t>(i / kBlock, 0, head_blocks - 1);
    };
    const int64_t first = block(queries.begin);
    const int64_t last = query_blocks - head_blocks + block(queries.end - 1);
    return {first, std::max(first, last)};
  }
  // Whether blocks m0 .. m1 - 1 of a place's queries, of one head or of two, hold some of these.
  bool meets(QueryInterval queries, int64_t m0, int64_t m1) const {
    const int64_t first = m0 % head_blocks, last = (m1 - 1) % head_blocks;
    return first > last || (first * kBlock < queries.end && (last + 1) * kBlock > queries.begin);
  }

  const char* k_panel(int64_t place, int64_t n) const {
    return at(k_panels, k, place * key_blocks + n);
  }
  const char* v_panel(int64_t place, int64_t n) const {
    return at(v_panels, v, place * key_blocks + n);
  }
  const char* q_panel(int64_t place, int64_t m) const {
    return at(q_panels, q, query_room(place, m));
  }
  const char* do_panel(int64_t place, int64_t m) const {
    return at(do_panels, d_o, query_room(place, m));
  }

  static char* at(char* panels, const PanelLayout& layout, int64_t n) {
    return panels + static_cast<size_t>(n) * layout.bytes;
  }
};

// One worker's, small enough to stay in its cache. There are kSquare x kSquare tiles of weights and
// of gradients at a time.
template <typename Engine>
struct BackwardScratch {
  using Real = typename Engine::Real;
  using Weights = typename Engine::template Tile<kLeft, kBlock, kBlock>;
  using Gradient = typename Engine::template Tile<kLeft | kRight, kBlock, kBlock>;
  static constexpr int64_t kTiles = Engine::kSquare * Engine::kSquare;
  Real* s;         // (kBlock, kPass)
  Real* dp;        // (kBlock, kPass)
  char* weights;   // (kTiles) of Weights
  char* gradient;  // (kTiles) of Gradient
  uint64_t* keep;  // (kBlock), with dropout
  Real* ds;        // (2, kBlock, kBlock), with the bias's gradient: keys x queries, then turned
  Real* slope;     // (kBlock, kPass), with softcap
  Real* rows;      // (kBlock, D or D_v), for varlen
  Real* o_rows;    // (kBlock, D_v), for delta
};

template <typename Engine>
BackwardScratch<Engine> lay_out_scratch(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                                        Arena& arena) {
  using Real = typename Engine::Real;
  using Scratch = BackwardScratch<Engine>;
  constexpr int64_t kTileSize = kBlock * kBlock, kPassSize = kBlock * Engine::kPass;
  constexpr int64_t kTiles = Scratch::kTiles;
  Scratch t;
  t.s = take<Real>(arena, kPassSize);
  t.dp = take<Real>(arena, kPassSize);
  t.weights = take<char>(arena, kTiles * static_cast<int64_t>(Scratch::Weights::kBytes));
  t.gradient = take<char>(arena, kTiles * static_cast<int64_t>(Scratch::Gradient::kBytes));
  t.ds = take<Real>(arena, p.dbias.data ? 2 * kTileSize : 0);
  t.keep = take<uint64_t>(arena, p.dropout.p > 0 ? kBlock : 0);
  t.slope = take<Real>(arena, p.score.softcap != 0 ? kPassSize : 0);
  t.rows = take<Real>(arena, kBlock * std::max(w.k.width, w.v.width));
  t.o_rows = take<Real>(arena, kBlock * w.v.width);
  return t;
}

// Keys are split so that few heads still use every worker; each split has a dq of its own.
TK_INLINE int64_t choose_splits(int64_t heads, int64_t workers, int64_t stripes) {
  constexpr int64_t kItemsPerWorker = 2;  // enough for the last one to finish near the others
  if (heads == 0 || workers == 1 || heads >= workers * kItemsPerWorker) return 1;
  const int64_t wanted = (workers * kItemsPerWorker + heads - 1) / heads;
  return std::max<int64_t>(1, std::min(wanted, stripes));
}

// Whether every weight has a bias of its own: the bias's gradient is then ds itself.
TK_INLINE bool writes_ds(const BackwardParams& p) {
  const int64_t* size = p.bias_size;
  return p.dbias.data && size[0] == p.B && size[1] == p.H_q && size[2] == p.M && size[3] == p.N;
}

template <typename Engine>
BackwardWorkspace<Engine> lay_out_backward(const BackwardParams& p, int64_t workers, Arena& arena) {
  using Real = typename Engine::Real;
  BackwardWorkspace<Engine> w;
  w.k = Engine::layout(kLeft | kLeftT, panel_rows(p.N), p.D);
  w.v = Engine::layout(kLeft, panel_rows(p.N), p.D_v);
  w.q = Engine::layout(kRight | kRightT, panel_rows(p.M), p.D);
  w.d_o = Engine::layout(kRight | kRightT, panel_rows(p.M), p.D_v);
  w.key_blocks = round_up(p.N, kBlock) / kBlock;
  w.head_blocks = round_up(p.M, kBlock) / kBlock;
  w.query_blocks = p.H_q / p.H_kv * w.head_blocks;
  const int64_t heads = p.B * p.H_kv;
  // A pass over the bias wants every head's operands.
  w.own_heads = can_own_heads(heads, workers) && (!p.dbias.data || writes_ds(p));
  w.splits = w.own_heads ? 1
                         : choose_splits(heads, workers,
                                         round_up(w.key_blocks, Engine::kSquare) / Engine::kSquare);
  const int64_t places = w.own_heads ? workers : heads;
  const size_t dq_bytes = static_cast<size_t>(kBlock * w.k.width) * sizeof(Real);
  w.chunk =
      std::max<int64_t>(Engine::kSquare, kQueryChunkBytes / (w.q.bytes + w.d_o.bytes + dq_bytes));
  w.query_rooms = w.own_heads ? std::min(w.chunk, w.query_blocks) : w.query_blocks;
  const int64_t queries = places * w.query_rooms, keys = places * w.key_blocks;
  w.k_panels = take<char>(arena, keys * static_cast<int64_t>(w.k.bytes));
  w.v_panels = take<char>(arena, keys * static_cast<int64_t>(w.v.bytes));
  w.q_panels = take<char>(arena, queries * static_cast<int64_t>(w.q.bytes));
  w.do_panels = take<char>(arena, queries * static_cast<int64_t>(w.d_o.bytes));
  w.lse = take<Real>(arena, queries * 2 * kBlock);
  w.delta = take<Real>(arena, queries * kBlock);
  w.dq = take<Real>(arena, w.splits * queries * kBlock * w.k.width);
  w.dk = take<Real>(arena, keys * kBlock * w.k.width);
  w.dv = take<Real>(arena, keys * kBlock * w.v.width);
  Arena one;
  lay_out_scratch(p, w, one);
  w.scratch_bytes = one.used;
  w.scratch = take<char>(arena, workers * static_cast<int64_t>(one.used));
  w.finite = take<bool>(arena, 1);
  return w;
}

template <typename Engine>
BackwardScratch<Engine> scratch_of(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                                   int64_t worker) {
  Arena arena{w.scratch + static_cast<size_t>(worker) * w.scratch_bytes};
  return lay_out_scratch(p, w, arena);
}

// Packs block n of keys and values of head `head`, counted over the batch, if a query may see it.
template <typename Engine>
void pack_keys_backward(const BackwardParams& p, const BackwardWorkspace<Engine>& w, int64_t worker,
                        int64_t place, int64_t head, int64_t n) {
  const int64_t b = head / p.H_kv, h = head % p.H_kv, item = place * w.key_blocks + n;
  if (!is_seen(seen_keys(p, b), n)) return;
  const auto used = [&](int64_t j) { return !p.live_keys || p.live_keys[b * p.N + j]; };
  auto* rows = scratch_of(p, w, worker).rows;
  pack_panel<Engine>(w.k, Slice{p.dtype, p.k, b, h, p.N, p.D}, n * kBlock, used, rows,
                     w.at(w.k_panels, w.k, item), w.finite);
  pack_panel<Engine>(w.v, Slice{p.dtype, p.v, b, h, p.N, p.D_v}, n * kBlock, used, rows,
                     w.at(w.v_panels, w.v, item), w.finite);
}

// to[0] + to[kBlock] = lse in powers of two: large scores leave no digits for its fraction.
template <typename Real>
TK_INLINE void lse_to_log2(Real lse, Real* to) {
  constexpr Real kLog2E = static_cast<Real>(1.4426950408889634);
  constexpr Real kRest = static_cast<Real>(sizeof(Real) == 4 ? 1.925963033e-8 : 2.03552737409e-17);
  to[0] = lse * kLog2E;
  to[kBlock] = std::fma(lse, kLog2E, -to[0]) + lse * kRest;
}

// Packs block m of the queries that share head `head`. Rows that see no key have lse = -inf: their
// q and do become zero, whatever they hold.
template <typename Engine>
void pack_queries_backward(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                           int64_t worker, int64_t place, int64_t head, int64_t m) {
  using Real = typename Engine::Real;
  constexpr Real kNothing = -static_cast<Real>(__builtin_inf());
  const int64_t b = head / p.H_kv, i0 = m % w.head_blocks * kBlock;
  const int64_t h = head % p.H_kv * (p.H_q / p.H_kv) + m / w.head_blocks;
  const int64_t row0 = (b * p.H_q + h) * p.lse_stride, item = w.query_room(place, m);
  const Real* lse = static_cast<const Real*>(p.lse) + row0;
  const Real* dlse = p.dlse ? static_cast<const Real*>(p.dlse) + row0 : nullptr;
  const auto sees = [&](int64_t i) { return lse[i] != kNothing; };
  const BackwardScratch<Engine> t = scratch_of(p, w, worker);
  pack_panel<Engine>(w.q, Slice{p.dtype, p.q, b, h, p.M, p.D}, i0, sees, t.rows,
                     w.at(w.q_panels, w.q, item), w.finite);
  const Slice o{p.dtype, p.o, b, h, p.M, p.D_v}, d_o{p.dtype, p.d_o, b, h, p.M, p.D_v};
  pack_panel<Engine>(w.d_o, d_o, i0, sees, t.rows, w.at(w.do_panels, w.d_o, item), w.finite);
  row_dots(d_o, o, i0, w.d_o.rows, w.d_o.width, sees, t.rows, t.o_rows, w.delta + item * kBlock);
  for (int64_t r = 0; r < w.q.rows; ++r) {
    const bool known = i0 + r < p.M && sees(i0 + r);
    if (dlse && known) w.delta[item * kBlock + r] -= dlse[i0 + r];
    // In a row that sees nothing every score is -inf; any finite number makes its p zero.
    lse_to_log2(known ? lse[i0 + r] : Real{0}, w.lse + item * 2 * kBlock + r);
  }
}

}  // namespace tk::cpu::TK_ISA
