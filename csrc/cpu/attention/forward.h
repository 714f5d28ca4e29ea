// Forward pass: o = softmax(s) v and lse, one block of queries at a time, in transposed tiles.
//
//   for each visible block of keys:
//     s = scores(k q^T)              keys x queries, in L1
//     m' = max(m, column max of s)   running maximum
//     p = exp(s - m')
//     l = l exp(m - m') + column sum of p
//     o = o exp(m - m') + v^T dropout(p)
//   o = (o / l)^T,  lse = m + log l
//
// Symbols and derivation: docs/attention.md; blocks and engines: docs/cpu.md. Milakov and
// Gimelshein 2018, arXiv:1805.02867.
#pragma once

#include <algorithm>
#include <utility>

#include "cpu/attention/dropout.h"
#include "cpu/attention/relative_keys.h"
#include "cpu/attention/softmax.h"
#include "cpu/engine/arena.h"
#include "cpu/engine/transpose_store.h"
#include "cpu/engine/workers.h"

namespace tk::cpu::TK_ISA {

// Keys and values are read in chunks that stay in L2 while a group of query blocks passes.
constexpr size_t kChunkBytes = 512 << 10;

template <typename Engine>
struct ForwardWorkspace {
  PanelLayout k, v, q;
  DistancePanels distances;
  int64_t key_blocks, chunk;  // key blocks per head, and per chunk
  bool own_heads;             // one worker processes a whole key head; its panels hold one head
  char* panels;               // (key heads or workers), see HeadPanels
  size_t panels_bytes;
  char* scratch;  // (workers), see ForwardScratch
  size_t scratch_bytes;
  bool* finite;
  const uint8_t* selected_heads;  // (B, H_q): 1 for heads to compute; null = all
};

// Packed keys and values of one head.
struct HeadPanels {
  char* k;  // (key_blocks)
  char* v;  // (key_blocks)
};

// Scratch of one worker, small enough for its L1 and L2. A member is one query block of a group.
template <typename Engine>
struct ForwardScratch {
  using Real = typename Engine::Real;
  static constexpr int64_t kQueries = Engine::kQueries;
  using Weights = typename Engine::template Tile<kRight, kBlock, kQueries>;
  using State = SoftmaxState<Real, kQueries>;
  State* state;       // (kGroup)
  Real* o;            // (kGroup, D_v, kQueries)
  bool* begun;        // (kGroup): o holds a sum; until then it is uninitialized
  char* q_panels;     // (kGroup)
  Real* s;            // (kBlock, kQueries)
  Bands<Real> bands;  // only with relative keys
  char* weights;      // kPending tiles of type Weights
  uint64_t* keep;     // (kBlock), only with dropout
  Real* rows;         // (kBlock, D or D_v), for packing and for writing o
};

template <typename Engine>
ForwardScratch<Engine> lay_out_scratch(const ForwardParams& p, const ForwardWorkspace<Engine>& w,
                                       Arena& arena) {
  using Real = typename Engine::Real;
  using Scratch = ForwardScratch<Engine>;
  constexpr int64_t kTileSize = kBlock * Scratch::kQueries;
  Scratch t;
  t.s = allocate<Real>(arena, kTileSize);
  t.bands.g = allocate<Real>(arena, w.distances ? kKeyGroup * kBand : 0);
  t.bands.held = allocate<Real>(arena, w.distances ? kKeyGroup * Scratch::kQueries : 0);
  t.weights =
      allocate<char>(arena, Engine::kPending * static_cast<int64_t>(Scratch::Weights::kBytes));
  t.state = allocate<typename Scratch::State>(arena, Engine::kGroup);
  t.o = allocate<Real>(arena, Engine::kGroup * w.v.width * Scratch::kQueries);
  t.begun = allocate<bool>(arena, Engine::kGroup);
  t.q_panels = allocate<char>(arena, Engine::kGroup * static_cast<int64_t>(w.q.bytes));
  t.keep = allocate<uint64_t>(arena, p.score.dropout_p > 0 ? kBlock : 0);
  t.rows = allocate<Real>(arena, kBlock * (w.k.width > w.v.width ? w.k.width : w.v.width));
  return t;
}

template <typename Engine>
ForwardWorkspace<Engine> lay_out_forward(const ForwardParams& p, int64_t workers, Arena& arena) {
  ForwardWorkspace<Engine> w;
  w.k = Engine::layout(kLeft, panel_rows(p.N), p.D);
  w.v = Engine::layout(kLeftT, panel_rows(p.N), p.D_v);
  w.q = Engine::layout(p.score.relative_keys ? kLeft | kRightT : unsigned{kRightT},
                       Engine::kQueries, p.D);
  w.distances = lay_out_distances<Engine>(p, kRightT, arena);
  w.key_blocks = round_up(p.N, kBlock) / kBlock;
  w.chunk = std::max<int64_t>(1, kChunkBytes / (w.k.bytes + w.v.bytes));
  const int64_t heads = p.B * p.H_kv;
  w.own_heads = can_own_heads(heads, workers);
  w.panels_bytes = static_cast<size_t>(w.key_blocks) * (w.k.bytes + w.v.bytes);
  w.panels =
      allocate<char>(arena, (w.own_heads ? workers : heads) * static_cast<int64_t>(w.panels_bytes));
  Arena one;
  lay_out_scratch(p, w, one);
  w.scratch_bytes = one.used;
  w.scratch = allocate<char>(arena, workers * static_cast<int64_t>(one.used));
  w.finite = allocate<bool>(arena, 1);
  return w;
}

template <typename Engine>
HeadPanels head_panels(const ForwardWorkspace<Engine>& w, int64_t slot) {
  char* const k = w.panels + static_cast<size_t>(slot) * w.panels_bytes;
  return {k, k + static_cast<size_t>(w.key_blocks) * w.k.bytes};
}

template <typename Engine>
ForwardScratch<Engine> scratch_of(const ForwardParams& p, const ForwardWorkspace<Engine>& w,
                                  int64_t worker) {
  Arena arena{w.scratch + static_cast<size_t>(worker) * w.scratch_bytes};
  return lay_out_scratch(p, w, arena);
}

// True if at least one of `count` query heads from h on is to be computed.
template <typename Engine>
bool any_selected(const ForwardParams& p, const ForwardWorkspace<Engine>& w, int64_t b, int64_t h,
                  int64_t count) {
  if (!w.selected_heads) return true;
  const uint8_t* const first = w.selected_heads + b * p.H_q + h;
  return std::any_of(first, first + count, [](uint8_t selected) { return selected != 0; });
}

// Packs key block n of `head`, which counts over the batch, unless no query needs it.
template <typename Engine>
void pack_keys_forward(const ForwardParams& p, const ForwardWorkspace<Engine>& w,
                       const HeadPanels& keys, int64_t worker, int64_t head, int64_t n) {
  const int64_t b = head / p.H_kv, h = head % p.H_kv, q_per_kv = p.H_q / p.H_kv;
  const LiveKeys is_live{visible_key_range(p, b), live_keys_of(p, b, h)};
  if (!overlaps(is_live.range, n) || !any_selected(p, w, b, h * q_per_kv, q_per_kv)) return;
  auto* rows = scratch_of(p, w, worker).rows;
  pack_panel<Engine>(w.k, keys_of(p, p.k, b, h, p.D), n * kBlock, is_live, rows,
                     keys.k + static_cast<size_t>(n) * w.k.bytes, w.finite);
  pack_panel<Engine>(w.v, keys_of(p, p.v, b, h, p.D_v), n * kBlock, is_live, rows,
                     keys.v + static_cast<size_t>(n) * w.v.bytes, w.finite);
}

// Products v^T p not yet added to o, which is read and written once for several of them. The first
// update overwrites o.
template <typename Engine>
struct Pending {
  using Real = typename Engine::Real;
  bool& begun;
  typename Engine::Product terms[Engine::kPending];
  int count = 0, used_tiles = 0;  // terms, and weight tiles handed out

  explicit Pending(bool& begun) : begun(begun) {}

  // Weight tile for the next term; the tiles of pending terms are not reused.
  size_t next_tile() { return static_cast<size_t>(used_tiles++ % Engine::kPending); }
  bool full() const { return count == Engine::kPending; }

  void add_to(Real* o, int64_t width) {
    if (count == 0) return;
    const WriteMode mode =
        std::exchange(begun, true) ? WriteMode::kAccumulate : WriteMode::kOverwrite;
    Engine::template multiply<Accuracy::kReduced>(width, Engine::kQueries, terms, count, o,
                                                  Engine::kQueries, mode, LoadPolicy::kStreamed);
    count = 0;
  }
};

// Updates the softmax state of group member `member` with one block of keys, and queues the product
// with its values. A full queue is added to o.
template <typename Engine>
void forward_block(const ForwardParams& p, const ForwardWorkspace<Engine>& w,
                   const HeadPanels& keys, const ForwardScratch<Engine>& t, int64_t member,
                   const Block& block, Pending<Engine>& pending) {
  using Real = typename Engine::Real;
  using Product = typename Engine::Product;
  using Weights = typename ForwardScratch<Engine>::Weights;
  constexpr int64_t kQueries = Engine::kQueries;
  const auto panel = static_cast<size_t>(block.j0 / kBlock);
  const char* q_panel = t.q_panels + static_cast<size_t>(member) * w.q.bytes;
  const char* v_panel = keys.v + panel * w.v.bytes;
  const Product scores{Engine::left(w.k, keys.k + panel * w.k.bytes, block.first),
                       Engine::right_t(w.q, q_panel, 0), p.D};
  Engine::template multiply<Accuracy::kFull>(block.keys, kQueries, &scores, 1, t.s, kQueries,
                                             WriteMode::kOverwrite, LoadPolicy::kStreamed);
  if (w.distances) {
    add_relative_keys<Engine, kQueries>(w.distances, w.q, q_panel, 0, p.D, block, t.bands, t.s);
  }
  finish_scores<Real, kQueries>(p, block, t.s, nullptr);

  const uint64_t* keep = p.score.dropout_p > 0 ? t.keep : nullptr;
  if (keep) dropout_bits<Real, kQueries>(p, block, t.keep);
  const Weights weights(t.s, t.weights + pending.next_tile() * Weights::kBytes);
  Real* o = t.o + member * w.v.width * kQueries;
  // Pending weights are relative to the old maximum and must be added first.
  const auto rescale_o = [&](int64_t lane, Vec<Real> factor) {
    pending.add_to(o, w.v.width);
    if (!pending.begun) return;
    for (Real* to = o + lane; to < o + w.v.width * kQueries; to += kQueries) {
      store(to, load(to) * factor);
    }
  };
  const PrefetchRange values = Engine::kStreamsLeft
                                   ? PrefetchRange{}
                                   : PrefetchRange{v_panel, static_cast<int64_t>(w.v.bytes)};
  online_softmax<Engine>(t.s, block.keys, score_unit<Real>(p).log2, keep, t.state[member],
                         rescale_o, weights, values, next_bias(p, block));
  pending.terms[pending.count++] = {Engine::left_t(w.v, v_panel, block.first), weights.right(),
                                    block.keys};
  if (pending.full()) pending.add_to(o, w.v.width);
}

// Processes the visible key blocks of `first` .. `last` - 1 for group member `member`, whose first
// query is i0.
template <typename Engine>
void forward_chunk(const ForwardParams& p, const ForwardWorkspace<Engine>& w,
                   const HeadPanels& keys, const ForwardScratch<Engine>& t, int64_t member,
                   int64_t b, int64_t h, int64_t i0, int64_t first, int64_t last) {
  const int64_t i1 = std::min(i0 + Engine::kQueries, p.M);
  const KeyInterval key_range = block_interval(p.mask, p.N, b, i0, i1);
  const int64_t end = std::min(last, (key_range.end + kBlock - 1) / kBlock);
  Pending<Engine> pending(t.begun[member]);
  Cursors cursors;
  int64_t next_key = -1;
  for (int64_t n = std::max(first, key_range.begin / kBlock); n < end; ++n) {
    Block block = make_block(p, b, h, i0, Engine::kQueries, n * kBlock);
    block.next_j = kBlock;
    block.cursors = &cursors;
    if (block.visible == Visible::kEmpty) continue;
    block.continues = block.key(0) == next_key;
    forward_block(p, w, keys, t, member, block, pending);
    next_key = block.key(block.keys);
  }
  pending.add_to(t.o + member * w.v.width * Engine::kQueries, w.v.width);
}

TK_INLINE bool sees_a_key(const ForwardParams& p, int64_t b, int64_t h, int64_t i) {
  for (int64_t j0 = 0; j0 < p.N; j0 += kBlock) {
    if (visible_bits(p.mask, p.N, b, h, i, j0)) return true;
  }
  return false;
}

// Packs a block of queries. An infinity or NaN in fully masked queries alone does not clear
// `w.finite`: they become zero.
template <typename Engine>
void begin_forward(const ForwardParams& p, const ForwardWorkspace<Engine>& w,
                   const ForwardScratch<Engine>& t, int64_t member, int64_t b, int64_t h,
                   int64_t i0) {
  const Slice q{p.dtype, p.q, b, h, p.M, p.D};
  char* const panel = t.q_panels + static_cast<size_t>(member) * w.q.bytes;
  bool finite = true;
  pack_panel<Engine>(w.q, q, i0, [](int64_t) { return true; }, t.rows, panel, &finite);
  if (!finite) {
    const auto is_live = [&](int64_t i) { return sees_a_key(p, b, h, i); };
    pack_panel<Engine>(w.q, q, i0, is_live, t.rows, panel, w.finite);
  }
  t.begun[member] = false;
  t.state[member].clear();
}

template <typename Engine>
void end_forward(const ForwardParams& p, const ForwardWorkspace<Engine>& w,
                 const ForwardScratch<Engine>& t, int64_t member, int64_t b, int64_t h,
                 int64_t i0) {
  using Real = typename Engine::Real;
  constexpr int64_t kQueries = Engine::kQueries;
  const auto& state = t.state[member];
  Real* const o = t.o + member * w.v.width * kQueries;
  if (!t.begun[member]) clear(o, w.v.width * kQueries);
  Real share[kQueries], lse[kQueries], rest[kQueries];
  for (int64_t lane = 0; lane < kQueries; lane += kLanes<Real>) {
    const Vec<Real> l = load(state.l + lane);
    store(share + lane, l == 0 ? Vec<Real>{} : keep_factor<Real>(p) / l);
    const LogSumExp<Real> x = state.log_sum_exp(lane, score_unit<Real>(p));
    store(lse + lane, x.lse);
    store(rest + lane, x.rest);
  }
  const int64_t queries = std::min(p.M - i0, kQueries);
  write_transposed<kQueries>({p.dtype, p.o, b, h, i0, queries, p.D_v}, o, w.v.width, share, t.rows);
  const int64_t row0 = (b * p.H_q + h) * p.lse_stride + i0;
  std::copy_n(lse, queries, static_cast<Real*>(p.lse) + row0);
  if (p.lse_rest) std::copy_n(rest, queries, static_cast<Real*>(p.lse_rest) + row0);
}

// Processes query blocks `first` .. `last` - 1 of head h.
template <typename Engine>
void forward_group(const ForwardParams& p, const ForwardWorkspace<Engine>& w,
                   const HeadPanels& keys, int64_t worker, int64_t b, int64_t h, int64_t first,
                   int64_t last) {
  const ForwardScratch<Engine> t = scratch_of(p, w, worker);
  const auto for_each_member = [&](auto&& visit) {
    for (int64_t m = first; m < last; ++m) visit(m - first, m * Engine::kQueries);
  };
  for_each_member([&](int64_t member, int64_t i0) { begin_forward(p, w, t, member, b, h, i0); });
  for (int64_t n = 0; n < w.key_blocks; n += w.chunk) {
    const int64_t end = std::min(n + w.chunk, w.key_blocks);
    for_each_member([&](int64_t member, int64_t i0) {
      forward_chunk(p, w, keys, t, member, b, h, i0, n, end);
    });
  }
  for_each_member([&](int64_t member, int64_t i0) { end_forward(p, w, t, member, b, h, i0); });
}

// Null `selected_heads` selects all. Returns false if the input contains values that the engine
// cannot represent; the output is then invalid.
template <typename Engine>
bool forward(const ForwardParams& p, const Workers& workers, Arena arena,
             const uint8_t* selected_heads) {
  ForwardWorkspace<Engine> w = lay_out_forward<Engine>(p, workers.count, arena);
  w.selected_heads = selected_heads;
  const int64_t query_blocks = round_up(p.M, Engine::kQueries) / Engine::kQueries;
  const int64_t members = w.key_blocks > w.chunk ? Engine::kGroup : 1;
  const int64_t groups = round_up(query_blocks, members) / members;
  const int64_t q_per_kv = p.H_q / p.H_kv;  // query heads per key head
  const auto attend = [&](const HeadPanels& keys, int64_t worker, int64_t head, int64_t group) {
    const int64_t b = head / p.H_kv, h = head % p.H_kv * q_per_kv + group / groups;
    const int64_t first = group % groups * members;
    if (!any_selected(p, w, b, h, 1)) return;
    forward_group(p, w, keys, worker, b, h, first, std::min(first + members, query_blocks));
  };
  *w.finite = true;
  const int64_t heads = p.B * p.H_kv;
  pack_all_distances<Engine>(p, w.distances, workers, w.finite,
                             [&](int64_t worker) { return scratch_of(p, w, worker).rows; });
  if (w.own_heads) {
    for_each(workers, heads, [&](int64_t worker, int64_t head) {
      [[maybe_unused]] const typename Engine::Session session;
      const HeadPanels keys = head_panels(w, worker);
      for (int64_t n = 0; n < w.key_blocks; ++n) pack_keys_forward(p, w, keys, worker, head, n);
      for (int64_t n = 0; n < q_per_kv * groups; ++n) attend(keys, worker, head, n);
    });
  } else {
    for_each(workers, heads * w.key_blocks, [&](int64_t worker, int64_t item) {
      const int64_t head = item / w.key_blocks;
      pack_keys_forward(p, w, head_panels(w, head), worker, head, item % w.key_blocks);
    });
    for_each(workers, heads * q_per_kv * groups, [&](int64_t worker, int64_t item) {
      [[maybe_unused]] const typename Engine::Session session;
      const int64_t head = item / (q_per_kv * groups);
      attend(head_panels(w, head), worker, head, item % (q_per_kv * groups));
    });
  }
  return *w.finite;
}

}  // namespace tk::cpu::TK_ISA
