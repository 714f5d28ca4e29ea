// Backward pass of linear attention: a scan over the keys for dq, then one over the queries, from
// the end, for dk and dv. No state of the forward pass is stored.
//
// With d_o' = d_o / l and dl = -(d_o . o) / l, where l is the normalizer, and the weights of the
// gradient P = triangle of (d_o' v^T + dl):
//
//   dphi(q) = P phi(k) + d_o' S^T + dl z         S, z: sums over earlier chunks of keys
//   dphi(k) = P^T phi(q) + v dS^T + dz           dS, dz: sums over later chunks of queries
//   dv      = weights^T d_o' + phi(k) dS
//   dS += phi(q)^T d_o', dz += sum of dl phi(q)
#pragma once

#include "cpu/linear/decay_gradient.h"
#include "cpu/linear/segments.h"
#include "cpu/linear/weights.h"

namespace tk::cpu::TK_ISA {

// The scan for dq. Its state is S^T.
template <typename Engine>
struct QueryScan {
  using Real = typename Engine::Real;
  Block<Engine> k, v, d_o, p;
  State<Engine> state;
  Real *q, *dq;  // kChunk x padded D
};

// The scan for dk and dv. Its state is dS.
template <typename Engine>
struct KeyScan {
  using Real = typename Engine::Real;
  Block<Engine> k, v, q, d_o, weights, p;
  State<Engine> state;
  Real *dk, *dv;
};

// Both scans use the same memory, one after the other.
template <typename Engine>
struct BackwardScan {
  using Real = typename Engine::Real;
  QueryScan<Engine> queries;
  KeyScan<Engine> keys;
  Real* o;   // kChunk x padded D_v
  Real* dl;  // kChunk
  ChunkDecay<Real>* decay;
  Real* sums;  // one state, for sum_segments
  Real* ends;  // (H_kv, chunks of all sequences, state): S and z after each chunk, for dlog_decay
  bool* finite;
};

template <typename Engine>
QueryScan<Engine> make_query_scan(const LinearProblem& p, Arena& arena) {
  using Real = typename Engine::Real;
  QueryScan<Engine> s;
  s.k = make_block<Engine>(arena, kRight, kChunk, p.D);
  s.v = make_block<Engine>(arena, kLeftT | kRightT, kChunk, p.D_v);
  s.d_o = make_block<Engine>(arena, kLeft, kChunk, p.D_v);
  s.p = make_block<Engine>(arena, kLeft, kChunk, kChunk);
  s.state = make_state<Engine>(arena, p, kRight, true);
  s.q = allocate<Real>(arena, kChunk * s.k.width());
  s.dq = allocate<Real>(arena, kChunk * s.k.width());
  return s;
}

template <typename Engine>
KeyScan<Engine> make_key_scan(const LinearProblem& p, Arena& arena) {
  using Real = typename Engine::Real;
  KeyScan<Engine> s;
  s.k = make_block<Engine>(arena, kLeft | kRightT, kChunk, p.D);
  s.v = make_block<Engine>(arena, kLeft | kRightT, kChunk, p.D_v);
  s.q = make_block<Engine>(arena, kLeft | kLeftT | kRight, kChunk, p.D);
  s.d_o = make_block<Engine>(arena, kLeft | kRight, kChunk, p.D_v);
  s.weights = make_block<Engine>(arena, kLeftT, kChunk, kChunk);
  s.p = make_block<Engine>(arena, kLeftT, kChunk, kChunk);
  s.state = make_state<Engine>(arena, p, kRight | kRightT, false);
  s.dk = allocate<Real>(arena, kChunk * s.k.width());
  s.dv = allocate<Real>(arena, kChunk * s.v.width());
  return s;
}

template <typename Engine>
BackwardScan<Engine> make_backward_scan(const LinearProblem& p, Arena& arena, bool* finite) {
  using Real = typename Engine::Real;
  BackwardScan<Engine> s;
  s.o = allocate<Real>(arena, kChunk * round_up(p.D_v, Engine::kWidth));
  s.dl = allocate<Real>(arena, kChunk);
  s.decay = allocate<ChunkDecay<Real>>(arena, 1);
  s.finite = finite;
  Arena other = arena;
  s.queries = make_query_scan<Engine>(p, arena);
  if (kAddressSanitizer) other = arena;  // red zones of one would lie in the other
  s.keys = make_key_scan<Engine>(p, other);
  arena.used = std::max(arena.used, other.used);
  s.sums = allocate<Real>(arena, s.keys.state.size());
  return s;
}

// Reads chunk `chunk` of phi(q), and d_o' and dl of the queries.
template <typename Engine>
void read_queries(const LinearBackwardParams& p, const BackwardScan<Engine>& s, const Segment& at,
                  int64_t h, int64_t chunk, const Block<Engine>& d_o, int64_t D,
                  typename Engine::Real* q) {
  using Real = typename Engine::Real;
  const Sequence& one = at.sequence;
  const int64_t row = one.first + chunk * kChunk, D_v = d_o.width();
  const auto all = [](int64_t) { return true; };
  read_features<Engine>(p.feature_map, slice(p, p.q, one, h, one.M, p.D), row, all, D, q, s.finite);
  read_rows<Engine>(slice(p, p.d_o, one, h, one.M, p.D_v), row, all, D_v, d_o.rows, s.finite);
  clear(s.dl, kChunk);
  if (!p.normalize) return;
  read_rows<Engine>(slice(p, p.o, one, h, one.M, p.D_v), row, all, D_v, s.o, s.finite);
  const Real* const normalizer =
      static_cast<const Real*>(p.normalizer) + (one.b * p.H_q + h) * stored_rows(p) + row;
  const int64_t rows = std::min(kChunk, one.M - chunk * kChunk);
  for (int64_t r = 0; r < rows; ++r) {
    const Real factor = Real{1} / normalizer[r];
    Real* const gradient = d_o.row(r);
    const Real* const o = s.o + r * D_v;
    Vec<Real> product{};
    for (int64_t c = 0; c < D_v; c += kLanes<Real>) {
      const Vec<Real> x = load(gradient + c) * factor;
      product += x * load(o + c);
      store(gradient + c, x);
    }
    s.dl[r] = -reduce<Real>(product, [](Vec<Real> a, Vec<Real> b) { return a + b; })[0];
  }
}

// Adds the keys and values that were read to S^T and z. Scales the rows of k.
template <typename Engine>
void advance_keys(const LinearProblem& p, const BackwardScan<Engine>& all) {
  using Real = typename Engine::Real;
  const QueryScan<Engine>& s = all.queries;
  if (p.log_decay.data) {
    s.state.scale(all.decay->from_start[kChunk - 1]);
    scale_rows(all.decay->to_end, s.k.width(), s.k.rows);
    s.k.pack();
  }
  multiply<Engine>(s.state.S.layout.rows, s.k.width(), {{s.v.left_t(), s.k.right(), kChunk}},
                   s.state.S.rows, s.state.S.width(), WriteMode::kAccumulate);
  add_rows<Real>(s.k.rows, nullptr, s.k.width(), s.state.z);
}

// Writes dq of chunk `chunk` of head h, and adds phi(q) . dphi(q) to the gradient of the decay.
template <typename Engine>
void write_dq(const LinearBackwardParams& p, const BackwardScan<Engine>& all, const Segment& at,
              int64_t h, int64_t chunk) {
  using Real = typename Engine::Real;
  const QueryScan<Engine>& s = all.queries;
  const Sequence& one = at.sequence;
  const int64_t row = one.first + chunk * kChunk;
  const int64_t rows = std::min(kChunk, one.M - chunk * kChunk), count = round_up(rows, 32);
  const int64_t D = s.k.width(), D_v = s.d_o.width();
  const ChunkDecay<Real>* const decay = p.log_decay.data ? all.decay : nullptr;
  read_queries(p, all, at, h, chunk, s.d_o, D, s.q);
  s.d_o.pack();
  if (p.causal) {
    multiply_triangle(count, s.d_o, s.v, s.p.rows);
    finish_weights(count, decay, all.dl, s.p.rows, static_cast<Real*>(nullptr));
    s.p.pack();
    if (decay) {
      scale_rows(decay->from_start, D_v, s.d_o.rows);
      s.d_o.pack();
      for (int64_t r = 0; r < kChunk; ++r) all.dl[r] *= decay->from_start[r];
    }
    multiply_by_weights(count, s.p, s.k, s.d_o, s.state.S, s.dq);
  } else {
    multiply<Engine>(count, D, {{s.d_o.left(), s.state.S.right(), D_v}}, s.dq, D);
  }
  for (int64_t r = 0; r < rows; ++r) {
    Real* const gradient = s.dq + r * D;
    const Real* const q = s.q + r * D;
    if (p.normalize) {
      for (int64_t c = 0; c < D; ++c) gradient[c] += all.dl[r] * s.state.z[c];
    }
    if (p.dlog_decay) *decay_gradient<Real>(p, at, row + r) += row_product(q, gradient, D);
    multiply_by_slope(p.feature_map, q, D, gradient);
    write_row(gradient, p.D, Real{1}, p.dtype, p.dq.data, row_offset(p.dq, one.b, h, row + r),
              p.dq.stride[3]);
  }
}

// Adds the queries that were read to dS and dz. Scales the rows of q.
template <typename Engine>
void advance_queries(const LinearProblem& p, const BackwardScan<Engine>& all) {
  using Real = typename Engine::Real;
  const KeyScan<Engine>& s = all.keys;
  if (p.log_decay.data) scale_rows(all.decay->from_start, s.q.width(), s.q.rows);
  s.q.pack(kLeftT);
  multiply<Engine>(s.state.S.layout.rows, s.d_o.width(), {{s.q.left_t(), s.d_o.right(), kChunk}},
                   s.state.S.rows, s.state.S.width(), WriteMode::kAccumulate);
  if (p.normalize) add_rows<Real>(s.q.rows, all.dl, s.q.width(), s.state.z);
}

// dk and dv of the chunk of keys that was read, from the queries of later chunks.
template <typename Engine>
void begin_dk_dv(const LinearProblem& p, const BackwardScan<Engine>& all, int64_t count) {
  using Real = typename Engine::Real;
  const KeyScan<Engine>& s = all.keys;
  const int64_t D = s.k.width(), D_v = s.v.width();
  multiply<Engine>(count, D, {{s.v.left(), s.state.S.right_t(), D_v}}, s.dk, D);
  multiply<Engine>(count, D_v, {{s.k.left(), s.state.S.right(), D}}, s.dv, D_v);
  for (int64_t r = 0; r < count; ++r) {
    const Real factor = p.log_decay.data ? all.decay->to_end[r] : Real{1};
    Real *const dk = s.dk + r * D, *const dv = s.dv + r * D_v;
    for (int64_t c = 0; c < D; ++c) dk[c] = (dk[c] + s.state.z[c]) * factor;
    for (int64_t c = 0; c < D_v; ++c) dv[c] *= factor;
  }
}

// Adds to dk and dv from the queries of head h in the same chunk, and these to dS and dz.
template <typename Engine>
void add_queries(const LinearBackwardParams& p, const BackwardScan<Engine>& all, const Segment& at,
                 int64_t h, int64_t chunk, int64_t count) {
  using Real = typename Engine::Real;
  const KeyScan<Engine>& s = all.keys;
  const ChunkDecay<Real>* const decay = p.log_decay.data ? all.decay : nullptr;
  constexpr Real* kNothing = nullptr;
  read_queries(p, all, at, h, chunk, s.d_o, s.q.width(), s.q.rows);
  s.q.pack(kLeft | kRight);
  s.d_o.pack();
  multiply_triangle(count, s.q, s.k, s.weights.rows);
  finish_weights(count, decay, static_cast<const Real*>(nullptr), s.weights.rows, kNothing);
  s.weights.pack();
  multiply_triangle(count, s.d_o, s.v, s.p.rows);
  finish_weights(count, decay, all.dl, s.p.rows, kNothing);
  s.p.pack();
  add_by_transposed_weights(count, s.p, s.q, s.dk);
  add_by_transposed_weights(count, s.weights, s.d_o, s.dv);
  advance_queries(p, all);
}

// `change` is that by the decay, for dlog_decay.
template <typename Engine>
void write_dk_dv(const LinearBackwardParams& p, const BackwardScan<Engine>& all, const Segment& at,
                 int64_t chunk, double change) {
  using Real = typename Engine::Real;
  const KeyScan<Engine>& s = all.keys;
  const Sequence& one = at.sequence;
  const int64_t row = one.first + chunk * kChunk;
  const int64_t rows = std::min(kChunk, one.N - chunk * kChunk);
  const int64_t D = s.k.width(), D_v = s.v.width();
  for (int64_t r = 0; r < rows; ++r) {
    Real *const dk = s.dk + r * D, *const dv = s.dv + r * D_v;
    const Real* const k = s.k.row(r);
    if (!one.sees(row + r)) {
      clear(dk, D);
      clear(dv, D_v);
    } else if (p.dlog_decay) {
      *decay_gradient<Real>(p, at, row + r) -= row_product(k, dk, D);
    }
    multiply_by_slope(p.feature_map, k, D, dk);
    write_row(dk, p.D, Real{1}, p.dtype, p.dk.data, row_offset(p.dk, one.b, at.head, row + r),
              p.dk.stride[3]);
    write_row(dv, p.D_v, Real{1}, p.dtype, p.dv.data, row_offset(p.dv, one.b, at.head, row + r),
              p.dv.stride[3]);
  }
  if (p.dlog_decay) {
    finish_decay_gradient(
        p, at, row, rows, change,
        static_cast<const Real*>(p.log_decay.data) + row_offset(p.log_decay, one.b, at.head, row));
  }
}

template <typename Engine>
void query_segment(const LinearBackwardParams& p, const BackwardScan<Engine>& all,
                   const Segment& at) {
  const QueryScan<Engine>& s = all.queries;
  const auto [begin, end] = at.range(at.sequence.M);
  const int64_t q_per_kv = p.H_q / p.H_kv;
  if (!p.causal) s.state.S.pack();
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    if (p.causal) {
      s.state.S.pack();
      read_keys(p, at, chunk, s.k, s.v, *all.decay, all.finite);
      s.k.pack();
      s.v.pack();
    }
    for (int64_t g = 0; g < q_per_kv; ++g) write_dq(p, all, at, at.head * q_per_kv + g, chunk);
    if (p.causal) advance_keys(p, all);
    if (p.dlog_decay) store_end(s.state, end_of_chunk(p, s.state, all.ends, at, chunk));
  }
}

template <typename Engine>
void key_segment(const LinearBackwardParams& p, const BackwardScan<Engine>& all,
                 const Segment& at) {
  const KeyScan<Engine>& s = all.keys;
  const auto [begin, end] = at.range(at.sequence.N);
  const int64_t q_per_kv = p.H_q / p.H_kv;
  if (!p.causal) s.state.S.pack();
  for (int64_t chunk = end; chunk-- > begin;) {
    const int64_t count = round_up(std::min(kChunk, at.sequence.N - chunk * kChunk), 32);
    if (p.causal) s.state.S.pack();
    read_keys(p, at, chunk, s.k, s.v, *all.decay, all.finite);
    const unsigned uses = p.causal ? kLeft | kRightT : kLeft;
    s.k.pack(uses);
    s.v.pack(uses);
    begin_dk_dv(p, all, count);
    const double change =
        p.dlog_decay ? change_by_decay(p, s.state, end_of_chunk(p, s.state, all.ends, at, chunk))
                     : 0;
    if (p.causal) {
      if (p.log_decay.data) s.state.scale(all.decay->from_start[kChunk - 1]);
      for (int64_t g = 0; g < q_per_kv; ++g) {
        add_queries(p, all, at, at.head * q_per_kv + g, chunk, count);
      }
    }
    write_dk_dv(p, all, at, chunk, change);
  }
}

// Sum of S^T and z over a segment of keys, from zero; returns its log-decay.
template <typename Engine>
double sum_key_segment(const LinearProblem& p, const BackwardScan<Engine>& all, const Segment& at) {
  const QueryScan<Engine>& s = all.queries;
  double log_decay = 0;
  s.state.clear();
  const auto [begin, end] = at.range(at.sequence.N);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    read_keys(p, at, chunk, s.k, s.v, *all.decay, all.finite);
    if (!p.log_decay.data) s.k.pack();
    s.v.pack(kLeftT);
    advance_keys(p, all);
    if (p.log_decay.data) log_decay += all.decay->total;
  }
  return log_decay;
}

// The same of dS and dz over a segment of queries.
template <typename Engine>
double sum_query_segment(const LinearBackwardParams& p, const BackwardScan<Engine>& all,
                         const Segment& at) {
  using Real = typename Engine::Real;
  const KeyScan<Engine>& s = all.keys;
  const int64_t q_per_kv = p.H_q / p.H_kv;
  double log_decay = 0;
  s.state.clear();
  const auto [begin, end] = at.range(at.sequence.M);
  for (int64_t chunk = end; chunk-- > begin;) {
    if (p.log_decay.data) {
      read_decay<Real>(p, at, chunk, *all.decay);
      log_decay += all.decay->total;
      s.state.scale(all.decay->from_start[kChunk - 1]);
    }
    for (int64_t g = 0; g < q_per_kv; ++g) {
      read_queries(p, all, at, at.head * q_per_kv + g, chunk, s.d_o, s.q.width(), s.q.rows);
      s.d_o.pack(kRight);
      advance_queries(p, all);
    }
  }
  return log_decay;
}

template <typename Engine>
struct BackwardWorkspace {
  SegmentStates<Engine> segments;
  BackwardScan<Engine>* scans;  // of each worker
  bool* finite;
};

template <typename Engine>
BackwardWorkspace<Engine> lay_out_backward(const LinearBackwardParams& p, int64_t workers,
                                           Arena& arena) {
  BackwardWorkspace<Engine> w;
  w.finite = allocate<bool>(arena, 1);
  w.scans = allocate<BackwardScan<Engine>>(arena, workers);
  w.segments = allocate_segments<Engine>(arena, p, choose_segments(p, workers));
  const int64_t states = p.dlog_decay ? p.H_kv * all_chunks(p) : 0;
  auto* const ends = allocate<typename Engine::Real>(arena, states * w.segments.size);
  for (int64_t n = 0; n < workers; ++n) {
    BackwardScan<Engine> scan = make_backward_scan<Engine>(p, arena, w.finite);
    scan.ends = ends;
    if (arena.base) w.scans[n] = scan;
  }
  return w;
}

// Returns false if the input contains values that the engine cannot represent; the output is then
// invalid.
template <typename Engine>
bool backward(const LinearBackwardParams& p, const Workers& workers, Arena arena) {
  using Real = typename Engine::Real;
  using Scan = BackwardScan<Engine>;
  const BackwardWorkspace<Engine> w = lay_out_backward<Engine>(p, workers.count, arena);
  *w.finite = true;
  if (p.dlog_decay) {
    clear(static_cast<Real*>(p.dlog_decay), (p.cu_seqlens ? 1 : p.B) * stored_rows(p) * p.H_kv);
  }
  run_scan(
      p, workers, w.segments, w.scans, {Direction::kForward, true}, p.initial, StateMemory{},
      [](const Scan& s) -> const State<Engine>& { return s.queries.state; },
      [&](const Scan& s, const Segment& at) { return sum_key_segment(p, s, at); },
      [&](const Scan& s, const Segment& at) { query_segment(p, s, at); });
  run_scan(
      p, workers, w.segments, w.scans, {Direction::kBackward, false}, p.d_end, p.d_initial,
      [](const Scan& s) -> const State<Engine>& { return s.keys.state; },
      [&](const Scan& s, const Segment& at) { return sum_query_segment(p, s, at); },
      [&](const Scan& s, const Segment& at) { key_segment(p, s, at); });
  clear_padding(p, p.dq, p.H_q, p.D);
  clear_padding(p, p.dk, p.H_kv, p.D);
  clear_padding(p, p.dv, p.H_kv, p.D_v);
  return *w.finite;
}

}  // namespace tk::cpu::TK_ISA
