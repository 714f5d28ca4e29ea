// The gated delta rule of a few tokens by the recurrence: two passes over the state per token.
#pragma once

#include "cpu/delta/chunk.h"

namespace tk::cpu::TK_ISA {

template <typename Real>
struct DeltaStepScratch {
  Real *q, *k, *kept;  // padded D
  Real *v, *o;         // padded D_v
  int64_t D, D_v;      // padded
};

template <typename Real>
DeltaStepScratch<Real> make_delta_step_scratch(const DeltaProblem& p, Arena& arena) {
  DeltaStepScratch<Real> t;
  t.D = round_up(p.D, kLanes<Real>), t.D_v = round_up(p.D_v, kLanes<Real>);
  for (Real** x : {&t.q, &t.k, &t.kept}) *x = allocate<Real>(arena, t.D);
  for (Real** x : {&t.v, &t.o}) *x = allocate<Real>(arena, t.D_v);
  return t;
}

template <typename Real>
void read_padded(const DeltaProblem& p, const Strided& x, int64_t b, int64_t h, int64_t token,
                 int64_t width, int64_t padded, Real* to) {
  read_row(p.dtype, x.data, row_offset(x, b, h, token), x.stride[3], width, to);
  for (int64_t c = width; c < padded; ++c) to[c] = Real{0};
}

// kept = exp(log_decay) of each channel.
template <typename Real>
void read_kept(const DeltaProblem& p, int64_t b, int64_t h, int64_t token, int64_t padded,
               Real* kept) {
  const auto* const from =
      static_cast<const Real*>(p.log_decay.data) + row_offset(p.log_decay, b, h, token);
  constexpr Real kSmallest = static_cast<Real>(kSmallestLogDecay<Real>);
  for (int64_t d = 0; d < padded; ++d) {
    const Real x = d < p.D ? from[p.gates > 1 ? d * p.log_decay.stride[3] : 0] : Real{0};
    kept[d] = x < kSmallest ? kSmallest : x;
  }
  for (int64_t d = 0; d < padded; d += kLanes<Real>) store(kept + d, exp<Real>(load(kept + d)));
}

constexpr int kStepVectors = kVectorBytes == 64 ? 8 : 4;  // of 32 or 16 registers, twice

// Columns c .. of a state, kCount at a time, which stay in L1 between both passes: u = beta (v -
// S^T k), S = kept S + k u^T, o = S^T q. Number is a vector or one element.
template <typename Number, int kCount, typename Real>
TK_INLINE void step_columns(const DeltaProblem& p, const DeltaStepScratch<Real>& t, Real beta,
                            int64_t c, Real* S) {
  constexpr int64_t W = sizeof(Number) / sizeof(Real);
  const auto read = [](const Real* from) TK_INLINE_LAMBDA {
    Number x;
    __builtin_memcpy(&x, from, sizeof(x));
    return x;
  };
  Number u[kCount], o[kCount] = {};
#pragma GCC unroll 8
  for (int n = 0; n < kCount; ++n) u[n] = read(t.v + c + n * W);
  for (int64_t d = 0; d < p.D; ++d) {
    const Real k = t.k[d] * t.kept[d];
#pragma GCC unroll 8
    for (int n = 0; n < kCount; ++n) u[n] -= k * read(S + d * p.D_v + c + n * W);
  }
#pragma GCC unroll 8
  for (int n = 0; n < kCount; ++n) u[n] *= beta;
  for (int64_t d = 0; d < p.D; ++d) {
    const Real kept = t.kept[d], k = t.k[d], q = t.q[d];
#pragma GCC unroll 8
    for (int n = 0; n < kCount; ++n) {
      Real* const at = S + d * p.D_v + c + n * W;
      const Number row = read(at) * kept + k * u[n];
      __builtin_memcpy(at, &row, sizeof(row));
      o[n] += q * row;
    }
  }
  __builtin_memcpy(t.o + c, o, sizeof(o));
}

template <typename Real>
void step_delta_state(const DeltaProblem& p, const DeltaStepScratch<Real>& t, Real beta, Real* S) {
  constexpr int64_t W = kLanes<Real>, kStrip = kStepVectors * W;
  int64_t c = 0;
  for (; c + kStrip <= p.D_v; c += kStrip) step_columns<Vec<Real>, kStepVectors>(p, t, beta, c, S);
  for (; c + W <= p.D_v; c += W) step_columns<Vec<Real>, 1>(p, t, beta, c, S);
  for (; c < p.D_v; ++c) step_columns<Real, 1>(p, t, beta, c, S);
}

template <typename Real>
void delta_step(const DeltaForwardParams& p, const DeltaStepScratch<Real>& t, int64_t b, int64_t h,
                int64_t token) {
  const int64_t head = h / (p.H_v / p.H_k);
  read_padded(p, p.q, b, head, token, p.D, t.D, t.q);
  read_padded(p, p.k, b, head, token, p.D, t.D, t.k);
  read_padded(p, p.v, b, h, token, p.D_v, t.D_v, t.v);
  read_kept(p, b, h, token, t.D, t.kept);
  Real inverse;
  if (p.l2norm) {
    normalize_rows(1, t.D, t.q, &inverse);
    normalize_rows(1, t.D, t.k, &inverse);
  }
  const Real beta = static_cast<const Real*>(p.beta.data)[row_offset(p.beta, b, h, token)];
  step_delta_state(p, t, beta, static_cast<Real*>(p.end) + (b * p.H_v + h) * p.D * p.D_v);
  write_row(t.o, p.D_v, static_cast<Real>(p.scale), p.dtype, p.o.data, row_offset(p.o, b, h, token),
            p.o.stride[3]);
}

template <typename Real>
size_t count_delta_steps(const DeltaForwardParams& p, const Workers& workers) {
  Arena arena;
  for (int64_t n = 0; n < workers.count; ++n) make_delta_step_scratch<Real>(p, arena);
  return arena.used;
}

// `end` holds the initial state and becomes the final one.
template <typename Real>
void run_delta_steps(const DeltaForwardParams& p, const Workers& workers, Arena arena) {
  const size_t bytes = count_delta_steps<Real>(p, {1, nullptr});
  for_each_own(workers, p.B * p.H_v, [&](int64_t worker, int64_t item) {
    Arena own{arena.base + static_cast<size_t>(worker) * bytes};
    const DeltaStepScratch<Real> t = make_delta_step_scratch<Real>(p, own);
    for (int64_t i = 0; i < p.N; ++i) delta_step(p, t, item / p.H_v, item % p.H_v, i);
  });
}

}  // namespace tk::cpu::TK_ISA
