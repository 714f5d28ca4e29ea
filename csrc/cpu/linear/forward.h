// Forward pass of linear attention: o = (weights v + phi(q) S) / (sum of weights + phi(q) z + eps)
// within each chunk, then S += phi(k)^T v, z += sum of phi(k).
#pragma once

#include "cpu/linear/segments.h"
#include "cpu/linear/weights.h"

namespace tk::cpu::TK_ISA {

template <typename Engine>
struct ForwardScan {
  using Real = typename Engine::Real;
  Block<Engine> k, v, q, weights;
  State<Engine> state;
  Real* o;           // kChunk x padded D_v
  Real* normalizer;  // kChunk
  ChunkDecay<Real>* decay;
  Real* sums;  // one state, for sum_segments
  bool* finite;
};

template <typename Engine>
ForwardScan<Engine> make_forward_scan(const LinearProblem& p, Arena& arena, bool* finite) {
  using Real = typename Engine::Real;
  ForwardScan<Engine> s;
  s.k = make_block<Engine>(arena, kLeftT | kRightT, kChunk, p.D);
  s.v = make_block<Engine>(arena, kRight, kChunk, p.D_v);
  s.q = make_block<Engine>(arena, kLeft, kChunk, p.D);
  s.weights = make_block<Engine>(arena, kLeft, kChunk, kChunk);
  s.state = make_state<Engine>(arena, p, kRight, false);
  s.o = allocate<Real>(arena, kChunk * s.v.width());
  s.normalizer = allocate<Real>(arena, kChunk);
  s.decay = allocate<ChunkDecay<Real>>(arena, 1);
  s.sums = allocate<Real>(arena, s.state.size());
  s.finite = finite;
  return s;
}

// Adds the chunk that was read to the state. Scales the rows of k.
template <typename Engine>
void advance(const LinearProblem& p, const ForwardScan<Engine>& s) {
  using Real = typename Engine::Real;
  if (p.log_decay.data) {
    s.state.scale(s.decay->from_start[kChunk - 1]);
    scale_rows(s.decay->to_end, s.k.width(), s.k.rows);
  }
  s.k.pack(kLeftT);
  multiply<Engine, Accuracy::kFull>(s.state.S.layout.rows, s.v.width(),
                                    {{s.k.left_t(), s.v.right(), kChunk}}, s.state.S.rows,
                                    s.state.S.width(), WriteMode::kAccumulate);
  add_rows<Real>(s.k.rows, nullptr, s.k.width(), s.state.z);
}

// Writes o and the normalizer of the queries of chunk `chunk` of head h of q. Causal: k and v have
// been read.
template <typename Engine>
void write_outputs(const LinearForwardParams& p, const ForwardScan<Engine>& s, const Segment& at,
                   int64_t h, int64_t chunk) {
  using Real = typename Engine::Real;
  const Sequence& one = at.sequence;
  const int64_t row = one.first + chunk * kChunk;
  const int64_t rows = std::min(kChunk, one.M - chunk * kChunk), count = round_up(rows, 32);
  const int64_t D = s.q.width(), D_v = s.v.width();
  read_features<Engine>(
      p.feature_map, slice(p, p.q, one, h, one.M, p.D), row, [](int64_t) { return true; }, D,
      s.q.rows, s.finite);
  s.q.pack();
  if (p.causal) {
    const ChunkDecay<Real>* const decay = p.log_decay.data ? s.decay : nullptr;
    multiply_triangle(count, s.q, s.k, s.weights.rows);
    finish_weights(count, decay, static_cast<const Real*>(nullptr), s.weights.rows, s.normalizer);
    s.weights.pack();
    if (decay) {
      scale_rows(decay->from_start, D, s.q.rows);
      s.q.pack();
    }
    multiply_by_weights(count, s.weights, s.v, s.q, s.state.S, s.o);
  } else {
    clear(s.normalizer, kChunk);
    multiply<Engine>(count, D_v, {{s.q.left(), s.state.S.right(), D}}, s.o, D_v);
  }
  add_products(s.q.rows, count, D, s.state.z, s.normalizer);
  Real* const normalizers =
      p.normalize ? static_cast<Real*>(p.normalizer) + (one.b * p.H_q + h) * stored_rows(p) + row
                  : nullptr;
  for (int64_t r = 0; r < rows; ++r) {
    const Real sum = s.normalizer[r] + static_cast<Real>(p.eps);
    if (normalizers) normalizers[r] = sum;
    write_row(s.o + r * D_v, p.D_v, normalizers ? Real{1} / sum : Real{1}, p.dtype, p.o.data,
              row_offset(p.o, one.b, h, row + r), p.o.stride[3]);
  }
}

// Sums the state of a segment from zero, and its log-decay.
template <typename Engine>
double sum_segment(const LinearProblem& p, const ForwardScan<Engine>& s, const Segment& at) {
  double log_decay = 0;
  s.state.clear();
  const auto [begin, end] = at.range(at.sequence.N);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    read_keys(p, at, chunk, s.k, s.v, *s.decay, s.finite);
    s.v.pack();
    advance(p, s);
    if (p.log_decay.data) log_decay += s.decay->total;
  }
  return log_decay;
}

template <typename Engine>
void forward_segment(const LinearForwardParams& p, const ForwardScan<Engine>& s,
                     const Segment& at) {
  const auto [begin, end] = at.range(at.sequence.M);
  const int64_t q_per_kv = p.H_q / p.H_kv;
  if (!p.causal) s.state.S.pack();
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    if (p.causal) {
      s.state.S.pack();
      read_keys(p, at, chunk, s.k, s.v, *s.decay, s.finite);
      s.k.pack(kRightT);
      s.v.pack();
    }
    for (int64_t g = 0; g < q_per_kv; ++g) write_outputs(p, s, at, at.head * q_per_kv + g, chunk);
    if (p.causal) advance(p, s);
  }
}

template <typename Engine>
struct ForwardWorkspace {
  SegmentStates<Engine> segments;
  ForwardScan<Engine>* scans;  // of each worker
  bool* finite;
};

template <typename Engine>
ForwardWorkspace<Engine> lay_out_forward(const LinearForwardParams& p, int64_t workers,
                                         Arena& arena) {
  ForwardWorkspace<Engine> w;
  w.finite = allocate<bool>(arena, 1);
  w.scans = allocate<ForwardScan<Engine>>(arena, workers);
  w.segments = allocate_segments<Engine>(arena, p, choose_segments(p, workers));
  for (int64_t n = 0; n < workers; ++n) {
    const ForwardScan<Engine> scan = make_forward_scan<Engine>(p, arena, w.finite);
    if (arena.base) w.scans[n] = scan;
  }
  return w;
}

// Returns false if the input contains values that the engine cannot represent; the output is then
// invalid.
template <typename Engine>
bool forward(const LinearForwardParams& p, const Workers& workers, Arena arena) {
  const ForwardWorkspace<Engine> w = lay_out_forward<Engine>(p, workers.count, arena);
  using Scan = ForwardScan<Engine>;
  *w.finite = true;
  run_scan(
      p, workers, w.segments, w.scans, {Direction::kForward, false}, p.initial, p.end,
      [](const Scan& s) -> const State<Engine>& { return s.state; },
      [&](const Scan& s, const Segment& at) { return sum_segment(p, s, at); },
      [&](const Scan& s, const Segment& at) { forward_segment(p, s, at); });
  clear_padding(p, p.o, p.H_q, p.D_v);
  return *w.finite;
}

}  // namespace tk::cpu::TK_ISA
