// Forward: o = softmax(s) v and lse, one block of queries at a time, everything transposed.
//
//   for every block of keys that is not hidden:
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
#include "cpu/attention/softmax.h"
#include "cpu/engine/arena.h"
#include "cpu/engine/transpose_store.h"
#include "cpu/engine/workers.h"

namespace tk::cpu::TK_ISA {

// Keys and values are read a chunk at a time, which stays in the second-level cache while a group
// of blocks of queries passes over it.
constexpr size_t kChunkBytes = 512 << 10;

template <typename Engine>
struct ForwardWorkspace {
  PanelLayout k, v, q;
  int64_t key_blocks, chunk;  // blocks of a head, blocks of a chunk
  bool own_heads;             // a worker takes whole heads of k, and its panels hold one
  char* panels;               // (heads of k or workers), see HeadPanels
  size_t panels_bytes;
  char* scratch;  // (workers), see ForwardScratch
  size_t scratch_bytes;
  bool* finite;
};

// One head's keys and values.
struct HeadPanels {
  char* k;  // (key_blocks)
  char* v;  // (key_blocks)
};

// One worker's, small enough to stay in its cache.
template <typename Engine>
struct ForwardScratch {
  using Real = typename Engine::Real;
  static constexpr int64_t kQueries = Engine::kQueries;
  using Weights = typename Engine::template Tile<kRight, kBlock, kQueries>;
  using State = SoftmaxState<Real, kQueries>;
  State* state;    // (kGroup)
  Real* o;         // (kGroup, D_v, kQueries)
  bool* begun;     // (kGroup): whether anything was added to o, which is not cleared before
  char* q_panels;  // (kGroup)
  Real* s;         // (kBlock, kQueries)
  char* weights;   // (kPending) of Weights
  uint64_t* keep;  // (kBlock), with dropout
  Real* rows;      // (kBlock, D or D_v), for varlen and for writing o
};

template <typename Engine>
ForwardScratch<Engine> lay_out_scratch(const ForwardParams& p, const ForwardWorkspace<Engine>& w,
                                       Arena& arena) {
  using Real = typename Engine::Real;
  using Scratch = ForwardScratch<Engine>;
  constexpr int64_t kTileSize = kBlock * Scratch::kQueries;
  Scratch t;
  t.s = take<Real>(arena, kTileSize);
  t.weights = take<char>(arena, Engine::kPending * static_cast<int64_t>(Scratch::Weights::kBytes));
  t.state = take<typename Scratch::State>(arena, Engine::kGroup);
  t.o = take<Real>(arena, Engine::kGroup * w.v.width * Scratch::kQueries);
  t.begun = take<bool>(arena, Engine::kGroup);
  t.q_panels = take<char>(arena, Engine::kGroup * static_cast<int64_t>(w.q.bytes));
  t.keep = take<uint64_t>(arena, p.dropout.p > 0 ? kBlock : 0);
  t.rows = take<Real>(arena, kBlock * (w.k.width > w.v.width ? w.k.width : w.v.width));
  return t;
}

template <typename Engine>
ForwardWorkspace<Engine> lay_out_forward(const ForwardParams& p, int64_t workers, Arena& arena) {
  ForwardWorkspace<Engine> w;
  w.k = Engine::layout(kLeft, panel_rows(p.N), p.D);
  w.v = Engine::layout(kLeftT, panel_rows(p.N), p.D_v);
  w.q = Engine::layout(kRightT, Engine::kQueries, p.D);
  w.key_blocks = round_up(p.N, kBlock) / kBlock;
  w.chunk = std::max<int64_t>(1, kChunkBytes / (w.k.bytes + w.v.bytes));
  const int64_t heads = p.B * p.H_kv;
  w.own_heads = can_own_heads(heads, workers);
  w.panels_bytes = static_cast<size_t>(w.key_blocks) * (w.k.bytes + w.v.bytes);
  w.panels =
      take<char>(arena, (w.own_heads ? workers : heads) * static_cast<int64_t>(w.panels_bytes));
  Arena one;
  lay_out_scratch(p, w, one);
  w.scratch_bytes = one.used;
  w.scratch = take<char>(arena, workers * static_cast<int64_t>(one.used));
  w.finite = take<bool>(arena, 1);
  return w;
}

template <typename Engine>
HeadPanels head_panels(const ForwardWorkspace<Engine>& w, int64_t place) {
  char* const k = w.panels + static_cast<size_t>(place) * w.panels_bytes;
  return {k, k + static_cast<size_t>(w.key_blocks) * w.k.bytes};
}

template <typename Engine>
ForwardScratch<Engine> scratch_of(const ForwardParams& p, const ForwardWorkspace<Engine>& w,
                                  int64_t worker) {
  Arena arena{w.scratch + static_cast<size_t>(worker) * w.scratch_bytes};
  return lay_out_scratch(p, w, arena);
}

// Packs block n of keys and values of head `head`, counted over the batch, if a query may see it.
template <typename Engine>
void pack_keys_forward(const ForwardParams& p, const ForwardWorkspace<Engine>& w,
                       const HeadPanels& keys, int64_t worker, int64_t head, int64_t n) {
  const int64_t b = head / p.H_kv, h = head % p.H_kv;
  if (!is_seen(seen_keys(p, b), n)) return;
  const auto used = [&](int64_t j) { return !p.live_keys || p.live_keys[b * p.N + j]; };
  auto* rows = scratch_of(p, w, worker).rows;
  pack_panel<Engine>(w.k, keys_of(p, p.k, b, h, p.D), n * kBlock, used, rows,
                     keys.k + static_cast<size_t>(n) * w.k.bytes, w.finite);
  pack_panel<Engine>(w.v, keys_of(p, p.v, b, h, p.D_v), n * kBlock, used, rows,
                     keys.v + static_cast<size_t>(n) * w.v.bytes, w.finite);
}

// Products v^T p that o still has to take: it is read and written once for several of them. The
// first ones begin it.
template <typename Engine>
struct Pending {
  using Real = typename Engine::Real;
  bool& begun;
  typename Engine::Product terms[Engine::kPending];
  int count = 0, taken = 0;  // terms, and weights' places ever taken

  explicit Pending(bool& begun) : begun(begun) {}

  // Where the next term's weights go: not where those of another one still lie.
  size_t next_place() { return static_cast<size_t>(taken++ % Engine::kPending); }
  bool full() const { return count == Engine::kPending; }

  void add_to(Real* o, int64_t width) {
    if (count == 0) return;
    const Into into = std::exchange(begun, true) ? Into::kSum : Into::kFresh;
    Engine::template multiply<Exact::kMostly>(width, Engine::kQueries, terms, count, o,
                                              Engine::kQueries, into, Reads::kOnce);
    count = 0;
  }
};

// Takes a block of keys into the softmax's state of the group's block `member`, and its values into
// `pending`, or with all that is pending into o.
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
  Engine::template multiply<Exact::kFully>(block.keys, kQueries, &scores, 1, t.s, kQueries,
                                           Into::kFresh, Reads::kOnce);
  finish_scores<Real, kQueries>(p, block, t.s, nullptr);

  const uint64_t* keep = p.dropout.p > 0 ? t.keep : nullptr;
  if (keep) dropout_bits<Real, kQueries>(p, block, t.keep);
  const Weights weights(t.s, t.weights + pending.next_place() * Weights::kBytes);
  Real* o = t.o + member * w.v.width * kQueries;
  // Weights of before are relative to the maximum of before.
  const auto shrink_o = [&](int64_t lane, Vec<Real> factor) {
    pending.add_to(o, w.v.width);
    if (!pending.begun) return;
    for (Real* to = o + lane; to < o + w.v.width * kQueries; to += kQueries) {
      store(to, load(to) * factor);
    }
  };
  const Soon values = Engine::kReadsOnce ? Soon{} : Soon{v_panel, static_cast<int64_t>(w.v.bytes)};
  online_softmax<Engine>(t.s, block.keys, static_cast<Real>(score_to_log2(p)), keep,
                         t.state[member], shrink_o, weights, values, bias_ahead(p, block));
  pending.terms[pending.count++] = {Engine::left_t(w.v, v_panel, block.first), weights.right(),
                                    block.keys};
  if (pending.full()) pending.add_to(o, w.v.width);
}

// Takes those of the blocks `first` .. `last` - 1 of keys that are not hidden into the group's
// block `member`, which begins at query i0.
template <typename Engine>
void forward_chunk(const ForwardParams& p, const ForwardWorkspace<Engine>& w,
                   const HeadPanels& keys, const ForwardScratch<Engine>& t, int64_t member,
                   int64_t b, int64_t h, int64_t i0, int64_t first, int64_t last) {
  const int64_t i1 = std::min(i0 + Engine::kQueries, p.M);
  const KeyInterval seen = block_interval(p.mask, p.N, b, i0, i1);
  const int64_t end = std::min(last, (seen.end + kBlock - 1) / kBlock);
  Pending<Engine> pending(t.begun[member]);
  for (int64_t n = std::max(first, seen.begin / kBlock); n < end; ++n) {
    Block block = make_block(p, b, h, i0, Engine::kQueries, n * kBlock);
    block.next_j = kBlock;
    if (block.visible != Visible::kNone) forward_block(p, w, keys, t, member, block, pending);
  }
  pending.add_to(t.o + member * w.v.width * Engine::kQueries, w.v.width);
}

template <typename Engine>
void begin_forward(const ForwardParams& p, const ForwardWorkspace<Engine>& w,
                   const ForwardScratch<Engine>& t, int64_t member, int64_t b, int64_t h,
                   int64_t i0) {
  pack_panel<Engine>(
      w.q, Slice{p.dtype, p.q, b, h, p.M, p.D}, i0, [](int64_t) { return true; }, t.rows,
      t.q_panels + static_cast<size_t>(member) * w.q.bytes, w.finite);
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
  Real share[kQueries], lse[kQueries];
  for (int64_t lane = 0; lane < kQueries; lane += kLanes<Real>) {
    const Vec<Real> l = load(state.l + lane);
    store(share + lane, l == 0 ? Vec<Real>{} : keep_factor<Real>(p) / l);
    store(lse + lane, state.lse(lane));
  }
  const int64_t queries = std::min(p.M - i0, kQueries);
  write_turned<kQueries>({p.dtype, p.o, b, h, i0, queries, p.D_v}, o, w.v.width, share, t.rows);
  Real* to = static_cast<Real*>(p.lse) + (b * p.H_q + h) * p.lse_stride + i0;
  for (int64_t lane = 0; lane < queries; ++lane) to[lane] = lse[lane];
}

// Attends with blocks `first` .. `last` - 1 of head h's queries.
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

// False: the engine cannot take these numbers, and what was written is of no use.
template <typename Engine>
bool forward(const ForwardParams& p, const Workers& workers, Arena arena) {
  const ForwardWorkspace<Engine> w = lay_out_forward<Engine>(p, workers.count, arena);
  const int64_t query_blocks = round_up(p.M, Engine::kQueries) / Engine::kQueries;
  const int64_t members = w.key_blocks > w.chunk ? Engine::kGroup : 1;
  const int64_t groups = round_up(query_blocks, members) / members;
  const int64_t sharing = p.H_q / p.H_kv;  // heads of q that share one of k
  const auto attend = [&](const HeadPanels& keys, int64_t worker, int64_t head, int64_t group) {
    const int64_t first = group % groups * members;
    forward_group(p, w, keys, worker, head / p.H_kv, head % p.H_kv * sharing + group / groups,
                  first, std::min(first + members, query_blocks));
  };
  *w.finite = true;
  const int64_t heads = p.B * p.H_kv;
  if (w.own_heads) {
    for_each(workers, heads, [&](int64_t worker, int64_t head) {
      [[maybe_unused]] const typename Engine::Session session;
      const HeadPanels keys = head_panels(w, worker);
      for (int64_t n = 0; n < w.key_blocks; ++n) pack_keys_forward(p, w, keys, worker, head, n);
      for (int64_t n = 0; n < sharing * groups; ++n) attend(keys, worker, head, n);
    });
  } else {
    for_each(workers, heads * w.key_blocks, [&](int64_t worker, int64_t item) {
      const int64_t head = item / w.key_blocks;
      pack_keys_forward(p, w, head_panels(w, head), worker, head, item % w.key_blocks);
    });
    for_each(workers, heads * sharing * groups, [&](int64_t worker, int64_t item) {
      [[maybe_unused]] const typename Engine::Session session;
      const int64_t head = item / (sharing * groups);
      attend(head_panels(w, head), worker, head, item % (sharing * groups));
    });
  }
  return *w.finite;
}

}  // namespace tk::cpu::TK_ISA
