// The recurrence, token by token, for few tokens. The state stays in registers.
#pragma once

#include "cuda/linear/decay.cuh"
#include "cuda/linear/features.cuh"
#include "cuda/linear/running_state.cuh"

namespace tk::cuda {

struct StepsArguments {
  LinearProblem problem;
  Strided o;
  States states;  // of sequences: read, then overwritten by the final ones
};

// One CTA for each key head: kColumns columns of S at a time, whose rows kGroups threads divide.
template <typename Element, int kWidth>
class Steps {
 public:
  static constexpr int kColumns = 64, kGroups = kWidth <= 64 ? 4 : 8;
  static constexpr int kThreads = kColumns * kGroups;

  struct Memory {
    float key[kWidth], query[kWidth], z[kWidth];
    float parts[kGroups][kColumns];
  };

  TK_DEVICE_METHOD Steps(const StepsArguments& args, Memory& memory)
      : args_(args), p_(args.problem), memory_(memory) {
    const int heads = static_cast<int>(p_.H_kv), program = static_cast<int>(blockIdx.x);
    b_ = program / heads;
    h_ = program % heads;
  }

  TK_DEVICE_METHOD void run() {
    const int D_v = static_cast<int>(p_.D_v), D = static_cast<int>(p_.D);
    float* const z = args_.states.vector(p_, b_, h_);
    for (int first = 0; first < D_v; first += kColumns) {
      for (int c = thread(); c < kWidth; c += kThreads) memory_.z[c] = c < D ? z[c] : 0.0f;
      run_columns(first + thread() % kColumns);
    }
    for (int c = thread(); c < D; c += kThreads) z[c] = memory_.z[c];
  }

 private:
  static constexpr int kRows = kWidth / kGroups;  // of S, in each thread

  TK_DEVICE_METHOD static int thread() { return static_cast<int>(threadIdx.x); }

  // Reads phi of a row into shared memory.
  TK_DEVICE_METHOD void read_features(const Strided& x, int h, int i,
                                      float (&features)[kWidth]) const {
    const Element* const row = rows_of<const Element>(x, b_, h, 0, p_.D).at(i);
    for (int c = thread(); c < kWidth; c += kThreads) {
      features[c] = c < p_.D ? feature(p_.feature_map, to_float(row[c])) : 0.0f;
    }
  }

  // All tokens, for one column of S.
  TK_DEVICE_METHOD void run_columns(int column) {
    float S[kRows];
    visit_state(column, [&](int n, float& x) { S[n] = x; }, S);
#pragma unroll 1
    for (int i = 0; i < static_cast<int>(p_.N); ++i) add_token(i, column, S);
    visit_state(column, [&](int n, float& x) { x = S[n]; }, S);
  }

  // Calls visit(n, x) for the thread's elements of S that exist; the others become 0.
  template <typename Visit>
  TK_DEVICE_METHOD void visit_state(int column, const Visit& visit, float (&S)[kRows]) const {
    float* const data = args_.states.matrix(p_, b_, h_);
    const int D = static_cast<int>(p_.D), D_v = static_cast<int>(p_.D_v);
    const int first_row = opaque(thread() / kColumns * kRows);  // addresses are not kept
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      if (first_row + n < D && column < D_v) {
        visit(n, data[(first_row + n) * D_v + column]);
      } else {
        S[n] = 0.0f;
      }
    }
  }

  TK_DEVICE_METHOD void add_token(int i, int column, float (&S)[kRows]) {
    const int first_row = thread() / kColumns * kRows;
    const float kept = decay(i);
    read_features(p_.k, h_, i, memory_.key);
    for (int c = thread(); c < kWidth; c += kThreads) {
      memory_.z[c] = memory_.z[c] * kept + memory_.key[c];  // the thread's own element
    }
    const bool exists = column < p_.D_v;
    const float value =
        exists ? to_float(rows_of<const Element>(p_.v, b_, h_, 0, p_.D_v).at(i)[column]) : 0.0f;
    const int group = static_cast<int>(p_.H_q / p_.H_kv);
    for (int g = h_ * group; g < (h_ + 1) * group; ++g) {
      read_features(p_.q, g, i, memory_.query);
      __syncthreads();  // features and z are written
      if (g == h_ * group) {
#pragma unroll
        for (int n = 0; n < kRows; ++n) {
          const int row = first_row + n;
          if (row < p_.D) S[n] = S[n] * kept + memory_.key[row] * value;
        }
      }
      float y = 0.0f;
#pragma unroll
      for (int n = 0; n < kRows; ++n) y += memory_.query[first_row + n] * S[n];
      memory_.parts[thread() / kColumns][thread() % kColumns] = y;
      const float l = normalizer();
      __syncthreads();  // the parts are written; features and z have been read
      if (thread() < kColumns && exists) {
        float sum = 0.0f;
        for (int n = 0; n < kGroups; ++n) sum += memory_.parts[n][thread()];
        rows_of<Element>(args_.o, b_, g, 0, p_.D_v).at(i)[column] = to_element<Element>(sum / l);
      }
    }
  }

  TK_DEVICE_METHOD float decay(int i) const {
    return p_.log_decay.data ? expf(bounded(log_decay_of(p_, b_, h_, i))) : 1.0f;
  }

  // phi(q) . z + eps, by every warp.
  TK_DEVICE_METHOD float normalizer() const {
    if (!p_.normalize) return 1.0f;
    float sum = 0.0f;
#pragma unroll
    for (int c = lane_index(); c < kWidth; c += kWarp) sum += memory_.query[c] * memory_.z[c];
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
    }
    return sum + static_cast<float>(p_.eps);
  }

  const StepsArguments& args_;
  const LinearProblem& p_;
  Memory& memory_;
  int b_, h_;
};

template <typename Element, int kWidth>
TK_KERNEL((Steps<Element, kWidth>::kThreads), 1)
steps_kernel(const __grid_constant__ StepsArguments args) {
  using Steps = Steps<Element, kWidth>;
  TK_SHARED_MEMORY(shared);
  Steps(args, *reinterpret_cast<typename Steps::Memory*>(shared)).run();
}

}  // namespace tk::cuda
