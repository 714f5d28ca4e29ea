// Kernel launches of linear attention for one element type and width: a forward pass, a backward
// pass, and steps. docs/linear.md, section 6, explains segments, boundaries and the four results.
#pragma once

#include "cuda/common/arena.h"
#include "cuda/common/launch_config.cuh"
#include "cuda/linear/boundary_states.cuh"
#include "cuda/linear/decay_gradient.cuh"
#include "cuda/linear/kernels.h"
#include "cuda/linear/results.cuh"
#include "cuda/linear/steps.cuh"

namespace tk::cuda {

// Keys or queries, whose sums are states. start: before the first token, or after the last query.
struct StateSource {
  Strided x, c;  // k and v, or q and do
  Segments segments;
  States start;
  Statistics statistics;  // of queries
};

// States at boundaries, and the decay of each segment; null if they are not needed.
struct BoundaryStates : States {
  float* kept;
};

inline States states_of(const StateMemory& x) {
  return {static_cast<float*>(x.S), static_cast<float*>(x.z)};
}

inline States take_states(Arena& arena, const LinearProblem& p, int64_t count) {
  const int64_t heads = count * p.H_kv;
  return {arena.take<float>(heads * p.D * p.D_v), arena.take<float>(heads * p.D)};
}

inline BoundaryStates take_boundaries(Arena& arena, const LinearProblem& p, const Segments& s) {
  BoundaryStates all{take_states(arena, p, s.boundaries()), nullptr};
  if (p.log_decay.data) all.kept = arena.take<float>(s.boundaries() * p.H_kv);
  return all;
}

inline void launch_prefix(const StateSource& from, const BoundaryStates& states, const States& end,
                          const LinearProblem& p, bool reverse, void* stream) {
  const auto launch = [&](float* sums, const float* start, float* last, int64_t size) {
    const PrefixArguments a{from.segments,
                            sums,
                            states.kept,
                            start,
                            last,
                            static_cast<int>(size),
                            static_cast<int>(p.H_kv),
                            reverse};
    TK_LAUNCH(prefix_kernel, grid(ceil_of(size, kPrefixThreads) * p.H_kv * p.B), kPrefixThreads, 0,
              stream, a);
  };
  launch(states.S, from.start.S, end.S, p.D * p.D_v);
  launch(states.z, from.start.z, end.z, p.D);
}

// The kernels whose operands of products are of type Number.
template <typename Element, typename Number, int kWidth>
struct LinearLaunches {
  static constexpr LinearTile kTile = linear_tile(sizeof(Number), kWidth);

  const LinearProblem& p;
  void* stream;

  Segments segments(int64_t rows, bool by_chunk = false) const {
    return segments_of(p, rows, by_chunk ? kTile.tokens : linear_segment(kWidth));
  }

  // Turns the sums of all segments into the states at the boundaries. `end` receives the final
  // ones.
  template <bool kReverse>
  void sum_states(const StateSource& from, const BoundaryStates& states, const States& end) const {
    using Sums = SegmentSums<Element, Number, kWidth, kReverse>;
    const int64_t programs = from.segments.programs() * p.H_kv * ceil_of(p.D_v, Sums::kSlice);
    if (programs == 0) return;
    const SumsArguments a{p, from.segments, from.x, from.c, from.statistics, states, states.kept};
    TK_LAUNCH((sums_kernel<Element, Number, kWidth, kReverse>), grid(programs), Sums::kThreads,
              sizeof(typename Sums::Memory), stream, a);
    launch_prefix(from, states, end, p, kReverse, stream);
  }

  template <Result kResult>
  void compute(const ResultArguments& a) const {
    using ChunkResult = ChunkResult<Element, Number, kWidth, kResult>;
    const int64_t heads = is_reverse(kResult) ? p.H_kv : p.H_q;
    const int64_t slices = ceil_of(is_transposed(kResult) ? p.D : p.D_v, kTile.slice);
    const int64_t chunks = a.segments.programs() * (a.segments.length / kTile.tokens);
    if (chunks * heads == 0) return;
    TK_LAUNCH((results_kernel<Element, Number, kWidth, kResult>), grid(chunks * heads * slices),
              ChunkResult::kThreads, sizeof(typename ChunkResult::Memory), stream, a);
  }
};

template <typename Element, typename Number, int kWidth>
struct LinearForward : LinearLaunches<Element, Number, kWidth> {
  const LinearForwardParams& params;
  Segments keys;
  BoundaryStates states{};

  LinearForward(const LinearForwardParams& given, void* stream)
      : LinearLaunches<Element, Number, kWidth>{given, stream},
        params(given),
        keys(this->segments(given.N)) {}

  void lay_out(Arena& arena) { states = take_boundaries(arena, params, keys); }

  void run() const {
    const States end = states_of(params.end);
    const StateSource source{params.k, params.v, keys, states_of(params.initial), {}};
    this->template sum_states<false>(source, states, end);
    ResultArguments a{};
    a.problem = params;
    a.segments = params.causal ? keys : this->segments(params.M);
    a.a = params.q, a.b = params.k, a.c = params.v, a.out = params.o;
    a.normalizer = static_cast<float*>(params.normalizer);
    a.by_boundary = params.causal;
    a.start = params.causal ? states : end;
    this->template compute<Result::kO>(a);
  }
};

template <typename Element, typename Number, int kWidth>
struct LinearBackward : LinearLaunches<Element, Number, kWidth> {
  const LinearBackwardParams& params;
  Segments keys, queries;
  BoundaryStates S{}, dS{};     // at the boundaries
  States all_S{}, d_initial{};  // of all tokens, with the initial and final ones
  float* delta = nullptr;
  float *of_queries = nullptr, *of_keys = nullptr;  // products, for dlog_decay
  int64_t slices;

  LinearBackward(const LinearBackwardParams& given, void* stream)
      : LinearLaunches<Element, Number, kWidth>{given, stream},
        params(given),
        keys(this->segments(given.N, given.dlog_decay)),
        queries(this->segments(given.M, given.dlog_decay)),
        slices(ceil_of(given.D, this->kTile.slice)) {}

  // False if the only states are the initial one, none, and the gradient of the final one.
  bool has_sums() const {
    const LinearBackwardParams& p = params;
    return !p.causal || p.d_initial || keys.are_several() || p.dlog_decay;
  }

  void lay_out(Arena& arena) {
    const LinearBackwardParams& p = params;
    const int64_t rows = p.cu_seqlens ? 1 : p.B;
    if (p.normalize) delta = arena.take<float>(rows * p.H_q * p.M);
    if (has_sums()) {
      S = take_boundaries(arena, p, keys);
      dS = take_boundaries(arena, p, queries);
    }
    d_initial = states_of(p.d_initial);
    if (!p.causal) {
      all_S = take_states(arena, p, p.B);
      if (!d_initial.S) d_initial = take_states(arena, p, p.B);
    }
    if (p.dlog_decay) {
      of_queries = arena.take<float>(slices * rows * p.H_q * p.M);
      of_keys = arena.take<float>(slices * rows * p.H_kv * p.N);
    }
  }

  void run() const {
    const LinearBackwardParams& p = params;
    Statistics statistics{};
    if (p.normalize) {
      launch_delta();
      statistics = {static_cast<const float*>(p.normalizer), delta};
    }
    const StateSource of_k{p.k, p.v, keys, states_of(p.initial), {}};
    const StateSource of_q{p.q, p.d_o, queries, states_of(p.d_end), statistics};
    if (has_sums()) {
      this->template sum_states<false>(of_k, S, all_S);
      this->template sum_states<true>(of_q, dS, d_initial);
    }
    ResultArguments a{};
    a.problem = p;
    a.statistics = statistics;
    a.by_boundary = p.causal && has_sums();
    if (!p.causal) {
      compute_all(a, all_S, d_initial);
    } else if (has_sums()) {
      compute_all(a, S, dS);
    } else {
      compute_all(a, of_k.start, of_q.start);
    }
    if (p.dlog_decay) launch_decay_gradient();
  }

 private:
  // The gradients of q, k and v, from the states and their gradients.
  void compute_all(ResultArguments a, const States& states, const States& gradients) const {
    const LinearBackwardParams& p = params;
    a.segments = queries, a.start = states;
    a.a = p.d_o, a.b = p.v, a.c = p.k, a.x = p.q, a.out = p.dq, a.products = of_queries;
    this->template compute<Result::kDq>(a);

    a.segments = keys, a.start = gradients;
    a.a = p.v, a.b = p.d_o, a.c = p.q, a.x = p.k, a.out = p.dk, a.products = of_keys;
    this->template compute<Result::kDk>(a);

    a.a = p.k, a.b = p.q, a.c = p.d_o, a.out = p.dv;
    this->template compute<Result::kDv>(a);
  }

  void launch_delta() const {
    const LinearBackwardParams& p = params;
    const int64_t rows = (p.cu_seqlens ? 1 : p.B) * p.H_q * p.M;
    if (rows == 0) return;
    const DeltaArguments a{p.o,
                           p.d_o,
                           delta,
                           rows,
                           static_cast<int>(p.H_q),
                           static_cast<int>(p.M),
                           static_cast<int>(p.D_v)};
    TK_LAUNCH(delta_kernel<Element>, grid(ceil_of(rows, kDeltaWarps)), kDeltaWarps * kWarp, 0,
              this->stream, a);
  }

  void launch_decay_gradient() const {
    const int64_t programs = keys.programs() * params.H_kv;
    if (programs == 0) return;
    const DecayGradientArguments a{params,
                                   keys,
                                   static_cast<float*>(params.dlog_decay),
                                   of_queries,
                                   of_keys,
                                   S,
                                   dS,
                                   static_cast<int>(slices)};
    TK_LAUNCH(decay_gradient_kernel, grid(programs), kDecayGradientThreads,
              (kMaxTokens + kDecayGradientThreads / kWarp) * sizeof(double), this->stream, a);
  }
};

// Operands of products. float16 has too small a range for a state; docs/linear.md, section 8.
template <typename Element>
struct NumberOf {
  using Type = TwoParts;  // float16
};
template <>
struct NumberOf<BFloat16> {
  using Type = BFloat16;
};
template <>
struct NumberOf<float> {
  using Type = float;
};

template <template <typename, typename, int> typename Pass, typename Element, typename Number,
          int kWidth, typename Params>
size_t workspace_of(const Params& p) {
  Arena arena(nullptr);
  Pass<Element, Number, kWidth>(p, nullptr).lay_out(arena);
  return arena.bytes();
}

template <template <typename, typename, int> typename Pass, typename Element, typename Number,
          int kWidth, typename Params>
void run_pass(const Params& p, void* workspace, void* stream) {
  Arena arena(workspace);
  Pass<Element, Number, kWidth> pass(p, stream);
  pass.lay_out(arena);
  pass.run();
}

// With a gradient of log_decay bfloat16 operands have two parts: its terms cancel.
template <typename Element, int kWidth>
size_t linear_backward_workspace(const LinearBackwardParams& p) {
  using Number = typename NumberOf<Element>::Type;
  if constexpr (sizeof(Number) == 2) {
    if (p.dlog_decay) return workspace_of<LinearBackward, Element, TwoParts, kWidth>(p);
  }
  return workspace_of<LinearBackward, Element, Number, kWidth>(p);
}

template <typename Element, int kWidth>
void launch_linear_backward(const LinearBackwardParams& p, void* workspace, void* stream) {
  using Number = typename NumberOf<Element>::Type;
  if constexpr (sizeof(Number) == 2) {
    if (p.dlog_decay) {
      return run_pass<LinearBackward, Element, TwoParts, kWidth>(p, workspace, stream);
    }
  }
  run_pass<LinearBackward, Element, Number, kWidth>(p, workspace, stream);
}

template <typename Element, int kWidth>
void launch_linear_steps(const LinearForwardParams& p, void* stream) {
  if (p.B * p.H_kv * p.N == 0) return;
  using Steps = Steps<Element, kWidth>;
  const StepsArguments a{p, p.o, states_of(p.end)};
  TK_LAUNCH((steps_kernel<Element, kWidth>), grid(p.B * p.H_kv), Steps::kThreads,
            sizeof(typename Steps::Memory), stream, a);
}

template <typename Element, int kWidth>
const LinearKernels& linear_kernels() {
  using Number = typename NumberOf<Element>::Type;
  static constexpr LinearKernels kAll{&workspace_of<LinearForward, Element, Number, kWidth>,
                                      &run_pass<LinearForward, Element, Number, kWidth>,
                                      &linear_backward_workspace<Element, kWidth>,
                                      &launch_linear_backward<Element, kWidth>,
                                      &launch_linear_steps<Element, kWidth>};
  return kAll;
}

}  // namespace tk::cuda
