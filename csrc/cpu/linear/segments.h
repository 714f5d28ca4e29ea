// States at the start of segments: sums of each segment, then of those before it.
#pragma once

#include "cpu/linear/scan.h"

namespace tk::cpu::TK_ISA {

// In the order of the scan. The scan over queries (dS) passes over a sequence from its end.
enum class Direction : uint8_t { kForward, kBackward };

// Saved states and log-decays of all segments, in memory.
template <typename Engine>
struct SegmentStates {
  using Real = typename Engine::Real;
  int64_t segments;   // per head
  int64_t size;       // elements of a state
  Real* states;       // (heads, segments, size); null if no scan needs them
  double* log_decay;  // (heads, segments)

  Real* state(int64_t item) const { return states + item * size; }
};

template <typename Engine>
SegmentStates<Engine> allocate_segments(Arena& arena, const LinearProblem& p, int64_t segments) {
  const int64_t D = round_up(p.D, Engine::kWidth), D_v = round_up(p.D_v, Engine::kWidth);
  SegmentStates<Engine> all{segments, D * D_v + D, nullptr, nullptr};
  if (segments == 1 && p.causal) return all;
  const int64_t items = p.B * p.H_kv * segments;
  all.states = allocate<typename Engine::Real>(arena, items * all.size);
  all.log_decay = allocate<double>(arena, items);
  return all;
}

// Replaces the sums of the segments of a head by the states at their starts: `state` plus the sums
// of the segments before them in the direction of the scan, or of all segments if not causal.
// `state` becomes that after the last segment.
template <typename Engine>
void sum_segments(const LinearProblem& p, const SegmentStates<Engine>& all, int64_t head,
                  Direction direction, const State<Engine>& state, typename Engine::Real* scratch) {
  using Real = typename Engine::Real;
  state.save(scratch);
  for (int64_t n = 0; n < all.segments; ++n) {
    const int64_t number = direction == Direction::kForward ? n : all.segments - 1 - n;
    const int64_t item = head * all.segments + number;
    Real* const sums = all.state(item);
    const Real kept = p.log_decay.data ? static_cast<Real>(__builtin_exp(all.log_decay[item])) : 1;
    for (int64_t c = 0; c < all.size; ++c) {
      const Real start = scratch[c];
      scratch[c] = start * kept + sums[c];
      sums[c] = start;
    }
  }
  if (!p.causal) {
    for (int64_t n = 0; n < all.segments; ++n) {
      std::copy_n(scratch, all.size, all.state(head * all.segments + n));
    }
  }
  state.load(scratch);
}

struct Order {
  Direction direction;
  bool transposed;  // the state of the scan is the transpose of S
};

// Runs a scan over all segments of all heads. state_of(scan) is the state of a worker's scan,
// sum(scan, at) sums it over a segment and returns the log-decay, pass(scan, at) passes over a
// segment. The state before the first segment is `from`; that after the last one goes to `to`, if
// it is not null.
template <typename Engine, typename Scan, typename StateOf, typename Sum, typename Pass>
void run_scan(const LinearProblem& p, const Workers& workers, const SegmentStates<Engine>& all,
              const Scan* scans, Order order, const StateMemory& from, const StateMemory& to,
              StateOf&& state_of, Sum&& sum, Pass&& pass) {
  const int64_t heads = p.B * p.H_kv;
  if (all.states) {
    for_each(workers, heads * all.segments, [&](int64_t worker, int64_t item) {
      [[maybe_unused]] const typename Engine::Session session;
      const Scan& scan = scans[worker];
      all.log_decay[item] = sum(scan, segment_of(p, item, all.segments));
      state_of(scan).save(all.state(item));
    });
    for_each(workers, heads, [&](int64_t worker, int64_t head) {
      const Scan& scan = scans[worker];
      read_state(p, from, head, order.transposed, state_of(scan));
      sum_segments(p, all, head, order.direction, state_of(scan), scan.sums);
      if (to) write_state(p, state_of(scan), order.transposed, head, to);
    });
  }
  for_each(workers, heads * all.segments, [&](int64_t worker, int64_t item) {
    [[maybe_unused]] const typename Engine::Session session;
    const Scan& scan = scans[worker];
    all.states ? state_of(scan).load(all.state(item))
               : read_state(p, from, item, order.transposed, state_of(scan));
    pass(scan, segment_of(p, item, all.segments));
    if (to && !all.states) write_state(p, state_of(scan), order.transposed, item, to);
  });
}

}  // namespace tk::cpu::TK_ISA
