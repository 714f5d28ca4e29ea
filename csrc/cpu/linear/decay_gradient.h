// Gradient of the decay.
//
// dlog_decay_t = sum over i >= t in its chunk of phi(q_i) . dphi(q_i) - phi(k_i) . dphi(k_i), plus
// <dS, S> + <dz, z> at the end of the chunk. Instead of the last term, the sum could run to the end
// of the sequence, but cancellation would cost it its bits. The first scan stores S for it.
#pragma once

#include "cpu/linear/scan.h"

namespace tk::cpu::TK_ISA {

// Dot product of rows r of a and b.
template <typename Real>
Real row_product(const Real* a, const Real* b, int64_t padded) {
  Vec<Real> sum{};
  for (int64_t c = 0; c < padded; c += kLanes<Real>) sum += load(a + c) * load(b + c);
  return reduce<Real>(sum, [](Vec<Real> x, Vec<Real> y) { return x + y; })[0];
}

template <typename Real>
Real* decay_gradient(const LinearBackwardParams& p, const Segment& at, int64_t row) {
  return static_cast<Real*>(p.dlog_decay) + (at.sequence.b * p.H_kv + at.head) * stored_rows(p) +
         row;
}

// Number of chunks of all sequences, or a few more.
TK_INLINE int64_t all_chunks(const LinearProblem& p) {
  return p.cu_seqlens ? p.rows / kChunk + p.B : p.B * chunks_of(p.N);
}

// Place of the state after a chunk in `ends` (H_kv, all_chunks, state).
template <typename Engine>
typename Engine::Real* end_of_chunk(const LinearProblem& p, const State<Engine>& state,
                                    typename Engine::Real* ends, const Segment& at, int64_t chunk) {
  const Sequence& one = at.sequence;
  const int64_t first =
      p.cu_seqlens ? one.first / kChunk + one.number : one.number * chunks_of(p.N);
  const int64_t number = at.head * all_chunks(p) + first + chunk;
  return ends + number * state.size();
}

// Stores the state of the first scan, S^T and z, as S and z.
template <typename Engine>
void store_end(const State<Engine>& state, typename Engine::Real* to) {
  using Real = typename Engine::Real;
  constexpr int64_t W = kLanes<Real>;
  const int64_t D = state.S.width(), D_v = state.S.layout.rows;
  for (int64_t r = 0; r < D_v; r += W) {
    for (int64_t c = 0; c < D; c += W) {
      Vec<Real> square[W];
      for (int64_t n = 0; n < W; ++n) square[n] = load(state.S.row(r + n) + c);
      transpose<Real>(square);
      for (int64_t n = 0; n < W; ++n) store(to + (c + n) * D_v + r, square[n]);
    }
  }
  std::copy_n(state.z, D, to + D * D_v);
}

// <dS, S> + <dz, z>: `state` is that of the second scan, `end` was stored by the first.
template <typename Engine>
double change_by_decay(const LinearProblem& p, const State<Engine>& state,
                       const typename Engine::Real* end) {
  const int64_t D_v = state.S.width();
  double sum = row_product(state.z, end + state.S.size(), state.padded_D);
  for (int64_t d = 0; d < p.D; ++d) sum += row_product(state.S.row(d), end + d * D_v, D_v);
  return sum;
}

// dlog_decay of the chunk at `row`. It holds phi(q) . dphi(q) - phi(k) . dphi(k); `sum` is the
// change at the end.
template <typename Real>
void finish_decay_gradient(const LinearBackwardParams& p, const Segment& at, int64_t row,
                           int64_t rows, double sum, const Real* log_decay) {
  Real* const gradient = decay_gradient<Real>(p, at, row);
  for (int64_t r = rows; r-- > 0;) {
    sum += static_cast<double>(gradient[r]);
    const double step = log_decay[r * p.log_decay.stride[2]];
    const bool counts = at.sequence.sees(row + r) && step >= kSmallestLogDecay<Real>;
    gradient[r] = counts ? static_cast<Real>(sum) : Real{0};
  }
}

}  // namespace tk::cpu::TK_ISA
