// States at the boundaries of segments: the sum of each segment alone, then their prefix sums.
#pragma once

#include "cuda/linear/decay.cuh"
#include "cuda/linear/features.cuh"
#include "cuda/linear/load_rows.cuh"
#include "cuda/linear/running_state.cuh"
#include "cuda/linear/statistics.cuh"

namespace tk::cuda {

// x and c are k and v; or q and do, whose sums run from the last token to the first.
struct SumsArguments {
  LinearProblem problem;
  Segments segments;
  Strided x, c;
  Statistics statistics;
  States states;  // of boundaries: receives the sums of a segment at its end
  float* kept;    // (boundaries, H_kv): receives the factor by which it decays a state
};

// Sums of phi(k) v^T and phi(k) over a segment of one key head, a slice of the columns of v; or of
// f do^T and -delta f, where f = phi(q) / l, over its query heads.
template <typename Element, typename Number, int kWidth, bool kReverse>
class SegmentSums {
 public:
  static constexpr LinearTile kTile = linear_tile(sizeof(Number), kWidth);
  static constexpr int kTokens = kTile.tokens, kSlice = kTile.state_slice(kWidth);
  static constexpr int kWarps = kTile.warps(), kThreads = kTile.threads();

  struct Memory {
    alignas(128) Number x[kTokens * kWidth];
    Number c[kTokens * kSlice];
    ChunkDecay<kTokens> decay;
    float inverse[kTokens], delta[kTokens];
    float parts[kWarps][kWidth];  // sums of each warp's rows
  };

  TK_DEVICE_METHOD SegmentSums(const SumsArguments& args, Memory& memory)
      : args_(args), p_(args.problem), memory_(memory) {
    const int slices = ceil_divide(static_cast<int>(p_.D_v), kSlice);
    const int heads = static_cast<int>(p_.H_kv), program = static_cast<int>(blockIdx.x);
    column_ = program % slices * kSlice;
    h_ = program / slices % heads;
    segment_ = segment_of(args.segments, program / slices / heads);
  }

  TK_DEVICE_METHOD void run() {
    if (!segment_.exists()) return;
    visible_ = visible_of(p_, segment_);
    const int group = kReverse ? static_cast<int>(p_.H_q / p_.H_kv) : 1;
    state_.clear();
    const Chunks<kTokens, kReverse> chunks(args_.segments, segment_);
#pragma unroll 1
    for (int step = 0; step < chunks.count; ++step) {
      for (int n = 0; n < group; ++n) add_rows(chunks.first(step), h_ * group + n, n == 0);
    }
    store();
  }

 private:
  using Loader = RowLoader<Element, kWidth>;
  using SliceLoader = RowLoader<Element, kSlice>;

  TK_DEVICE_METHOD bool is_decayed() const { return p_.log_decay.data; }

  TK_DEVICE_METHOD void add_rows(int first, int h, bool is_first_head) {
    const bool is_scaled = kReverse && p_.normalize;
    if (is_decayed() && is_first_head && warp_index() == 0) {
      memory_.decay.read(p_, segment_, h_, first, visible_);
    }
    if (is_scaled) {
      args_.statistics.read(p_, segment_, h, first, memory_.inverse, memory_.delta);
    }
    __syncthreads();  // both are written, and the previous tiles have been read
    if (is_decayed() && is_first_head) {
      total_ += memory_.decay.total;
      state_.multiply_by(memory_.decay.kept);
#pragma unroll
      for (int n = 0; n < Loader::kPerLane; ++n) sums_[n] *= memory_.decay.kept;
    }
    load(first, h, is_scaled);
    __syncthreads();  // the tiles are written
    state_.add_product(SharedTile<Number, kTokens, kWidth>{memory_.x},
                       SharedTile<Number, kTokens, kSlice>{memory_.c});
  }

  TK_DEVICE_METHOD void load(int first, int h, bool is_scaled) {
    const TokenRange live = kReverse ? TokenRange{0, segment_.tokens} : visible_;
    const float* const leave = kReverse ? memory_.decay.from_start : memory_.decay.to_end;
    const Loader loader;
    const SliceLoader slice_loader;
    const auto no_end = [](int) {};
    loader.load(
        SharedTile<Number, kTokens, kWidth>{memory_.x},
        rows_of<const Element>(args_.x, segment_.at, h, segment_.first, p_.D), first, live,
        [&](int row, int n, float x) {
          x = feature(p_.feature_map, x);
          if (is_decayed()) x *= leave[row];
          if (is_scaled) x *= memory_.inverse[row];
          if constexpr (kReverse) {
            if (is_scaled) sums_[n] -= x * memory_.delta[row];
          } else {
            sums_[n] += x;
          }
          return x;
        },
        no_end);
    slice_loader.load(
        SharedTile<Number, kTokens, kSlice>{memory_.c},
        from_column(rows_of<const Element>(args_.c, segment_.at, h, segment_.first, p_.D_v),
                    column_),
        first, live, [](int, int, float x) { return x; }, no_end);
  }

  TK_DEVICE_METHOD void store() {
    const int64_t number = segment_.boundary + segment_.index;
    const int64_t boundary = kReverse ? number : number + 1;
    state_.store(args_.states.matrix(p_, boundary, h_), p_, column_);
    if (column_ != 0) return;
    Loader().store_sums(sums_, memory_.parts[warp_index()]);
    __syncthreads();  // the sums are written
    float* const z = args_.states.vector(p_, boundary, h_);
    for (int c = static_cast<int>(threadIdx.x); c < static_cast<int>(p_.D); c += kThreads) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += memory_.parts[w][c];
      z[c] = sum;
    }
    if (is_decayed() && threadIdx.x == 0) args_.kept[number * p_.H_kv + h_] = exp2_of(total_);
  }

  const SumsArguments& args_;
  const LinearProblem& p_;
  Memory& memory_;
  RunningState<Number, kWidth> state_;
  float sums_[Loader::kPerLane] = {};  // of the lane's rows
  double total_ = 0.0;
  Segment segment_;
  TokenRange visible_;
  int h_, column_;
};

template <typename Element, typename Number, int kWidth, bool kReverse>
TK_KERNEL((SegmentSums<Element, Number, kWidth, kReverse>::kThreads), 1)
sums_kernel(const __grid_constant__ SumsArguments args) {
  using Sums = SegmentSums<Element, Number, kWidth, kReverse>;
  TK_SHARED_MEMORY(shared);
  Sums(args, *reinterpret_cast<typename Sums::Memory*>(shared)).run();
}

struct PrefixArguments {
  Segments segments;
  float* states;       // (boundaries, H_kv, size): sums of segments, replaced by states
  const float* kept;   // (boundaries, H_kv); null = no decay
  const float* start;  // (B, H_kv, size), before the first segment or after the last; null = zeros
  float* end;          // (B, H_kv, size): receives the last state; may be null
  int size, H_kv;
  bool reverse;
};

constexpr int kPrefixThreads = 256, kPrefixBatch = 8;

// A thread for each element of a state, which loads the sums of kPrefixBatch segments at a time: no
// load waits for the previous one. The running state is float64.
static TK_KERNEL(kPrefixThreads, 1) prefix_kernel(const __grid_constant__ PrefixArguments a) {
  const int blocks = ceil_divide(a.size, kPrefixThreads), program = static_cast<int>(blockIdx.x);
  const int element = program % blocks * kPrefixThreads + static_cast<int>(threadIdx.x);
  const int h = program / blocks % a.H_kv;
  const Segment all = sequence_of(a.segments, program / blocks / a.H_kv);
  if (element >= a.size) return;
  const int64_t own = (int64_t{all.b} * a.H_kv + h) * a.size + element;
  const auto at = [&](int n) {
    return a.states + ((all.boundary + int64_t{n}) * a.H_kv + h) * a.size + element;
  };
  double x = a.start ? a.start[own] : 0.0;
  *at(a.reverse ? all.count : 0) = static_cast<float>(x);
  for (int step = 0; step < all.count; step += kPrefixBatch) {
    float sums[kPrefixBatch], kept[kPrefixBatch];
#pragma unroll
    for (int e = 0; e < kPrefixBatch; ++e) {
      if (step + e >= all.count) break;
      const int n = a.reverse ? all.count - 1 - step - e : step + e;  // the segment
      sums[e] = *at(a.reverse ? n : n + 1);
      kept[e] = a.kept ? a.kept[(all.boundary + int64_t{n}) * a.H_kv + h] : 1.0f;
    }
#pragma unroll
    for (int e = 0; e < kPrefixBatch; ++e) {
      if (step + e >= all.count) break;
      x = x * kept[e] + sums[e];
      *at(a.reverse ? all.count - 1 - step - e : step + e + 1) = static_cast<float>(x);
    }
  }
  if (a.end) a.end[own] = static_cast<float>(x);
}

}  // namespace tk::cuda
