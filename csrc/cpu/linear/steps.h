// Linear attention of a few tokens by the recurrence: one pass over the state per token.
#pragma once

#include "cpu/linear/scan.h"

namespace tk::cpu::TK_ISA {

template <typename Real>
struct StepScratch {
  Real *q, *k, *v, *o;  // q_per_kv x padded D, padded D, padded D_v, q_per_kv x padded D_v
  int64_t D, D_v;       // padded
};

template <typename Real>
StepScratch<Real> make_step_scratch(const LinearProblem& p, Arena& arena) {
  const int64_t q_per_kv = p.H_q / p.H_kv;
  const int64_t D = round_up(p.D, kLanes<Real>), D_v = round_up(p.D_v, kLanes<Real>);
  return {allocate<Real>(arena, q_per_kv * D),
          allocate<Real>(arena, D),
          allocate<Real>(arena, D_v),
          allocate<Real>(arena, q_per_kv * D_v),
          D,
          D_v};
}

template <typename Real>
void read_token(const LinearProblem& p, const Strided& x, int64_t b, int64_t h, int64_t token,
                int64_t width, int64_t padded, bool is_mapped, Real* to) {
  read_row(p.dtype, x.data, row_offset(x, b, h, token), x.stride[3], width, to);
  for (int64_t c = width; c < padded; ++c) to[c] = Real{0};
  if (is_mapped) map_row(p.feature_map, width, padded, to);
}

// S = kept S + k v^T, z = kept z + k, o = q S, in one pass over S.
template <typename Real>
void step_state(const LinearProblem& p, const StepScratch<Real>& t, Real kept, Real* S, Real* z) {
  const int64_t q_per_kv = p.H_q / p.H_kv, D_v = p.D_v;
  clear(t.o, q_per_kv * t.D_v);
  for (int64_t d = 0; d < p.D; ++d) {
    Real* const row = S + d * D_v;
    const Real k = t.k[d];
    for (int64_t c = 0; c < D_v; ++c) row[c] = row[c] * kept + k * t.v[c];
    z[d] = z[d] * kept + k;
    for (int64_t g = 0; g < q_per_kv; ++g) {
      Real* const o = t.o + g * t.D_v;
      const Real q = t.q[g * t.D + d];
      for (int64_t c = 0; c < D_v; ++c) o[c] += q * row[c];
    }
  }
}

template <typename Real>
void step(const LinearForwardParams& p, const StepScratch<Real>& t, int64_t b, int64_t head,
          int64_t token) {
  const int64_t q_per_kv = p.H_q / p.H_kv, index = b * p.H_kv + head;
  Real* const S = static_cast<Real*>(p.end.S) + index * p.D * p.D_v;
  Real* const z = static_cast<Real*>(p.end.z) + index * p.D;
  for (int64_t g = 0; g < q_per_kv; ++g) {
    read_token(p, p.q, b, head * q_per_kv + g, token, p.D, t.D, true, t.q + g * t.D);
  }
  read_token(p, p.k, b, head, token, p.D, t.D, true, t.k);
  read_token(p, p.v, b, head, token, p.D_v, t.D_v, false, t.v);
  Real kept{1};
  if (p.log_decay.data) {
    const auto* const log_decay = static_cast<const Real*>(p.log_decay.data);
    const double step = log_decay[row_offset(p.log_decay, b, head, token)];
    kept = static_cast<Real>(__builtin_exp(std::max(step, kSmallestLogDecay<Real>)));
  }
  step_state(p, t, kept, S, z);
  for (int64_t g = 0; g < q_per_kv; ++g) {
    Real sum = static_cast<Real>(p.eps);
    for (int64_t d = 0; d < p.D; ++d) sum += t.q[g * t.D + d] * z[d];
    write_row(t.o + g * t.D_v, p.D_v, p.normalize ? Real{1} / sum : Real{1}, p.dtype, p.o.data,
              row_offset(p.o, b, head * q_per_kv + g, token), p.o.stride[3]);
  }
}

template <typename Real>
size_t count_steps_workspace(const LinearForwardParams& p, const Workers& workers) {
  Arena arena;
  for (int64_t n = 0; n < workers.count; ++n) make_step_scratch<Real>(p, arena);
  return arena.used;
}

// `end` holds the initial state and becomes the final one.
template <typename Real>
void run_steps(const LinearForwardParams& p, const Workers& workers, Arena arena) {
  const size_t bytes = count_steps_workspace<Real>(p, {1, nullptr});
  for_each_own(workers, p.B * p.H_kv, [&](int64_t worker, int64_t item) {
    Arena own{arena.base + static_cast<size_t>(worker) * bytes};
    const StepScratch<Real> t = make_step_scratch<Real>(p, own);
    for (int64_t i = 0; i < p.M; ++i) step(p, t, item / p.H_kv, item % p.H_kv, i);
  });
}

}  // namespace tk::cpu::TK_ISA
