// The kernels of one instruction set. The build compiles this file once per instruction set, with
// TK_ISA as the name of the namespace.
#ifndef TK_ISA
#error "compile with -DTK_ISA=portable, avx2, avx512, avx512_bf16 or amx"
#endif

#include "cpu/attention/kernels.h"

#include <algorithm>
#include <cmath>

#include "common/workspace.h"
#include "cpu/attention/backward_rows.h"
#include "cpu/attention/block_mask.h"
#include "cpu/attention/forward.h"
#include "cpu/engine/engines.h"

namespace tk::cpu::TK_ISA {

namespace {

// For so few keys and queries, splitting and packing float32 takes longer than the products.
bool is_short(const Problem& p) { return p.M <= kKeyGroup && p.N <= kKeyGroup; }

template <typename Run>
void with_engine(const Problem& p, Run&& run) {
  TK_ISA::with_engine(p.dtype, is_short(p), run);
}

// Above this number of queries, half a block more or less matters little.
constexpr int64_t kMaxNarrowQueries = 256;

// True if the forward pass has blocks of 32 queries: half of its last block of 64 would be empty.
bool is_narrow(const Problem& p) {
  if (p.dtype == DType::kFloat64 || p.M > kMaxNarrowQueries) return false;
  const bool is_fma = !Float32Engine::kSplits || (p.dtype == DType::kFloat32 && is_short(p));
  return is_fma && (p.M - 1) % Fma<float>::kQueries < NarrowEngine::kQueries;
}

template <typename Run>
void with_forward_engine(const Problem& p, Run&& run) {
  if constexpr (!kOnlyBFloat16) {
    if (is_narrow(p)) return static_cast<void>(run(NarrowEngine{}));
  }
  with_engine(p, run);
}

// Bytes of workspace.
template <typename Count>
size_t workspace(const Problem& p, Count&& count) {
  return largest_workspace(p.dtype, is_short(p), count);
}

Choice choice(const Problem& p) {
  Choice found{};
  with_forward_engine(p, [&](auto engine) {
    using Engine = decltype(engine);
    found = {Engine::kName, Engine::kQueries, kBlock};
    return true;
  });
  return found;
}

size_t packed_workspace(const ForwardParams& p, const Workers& workers) {
  const auto count = [&](auto engine) {
    Arena arena;
    lay_out_forward<decltype(engine)>(p, workers.count, arena);
    return arena.used;
  };
  if constexpr (!kOnlyBFloat16) {
    if (is_narrow(p)) return count(NarrowEngine{});
  }
  return workspace(p, count);
}

void run_packed(const ForwardParams& p, const Workers& workers, void* memory,
                const uint8_t* selected_heads = nullptr) {
  with_forward_engine(p, [&](auto engine) {
    return forward<decltype(engine)>(p, workers, Arena{static_cast<char*>(memory)}, selected_heads);
  });
}

size_t forward_workspace(const ForwardParams& p, const Workers& workers) {
  return is_decoding(p) ? decode_workspace({&p, p.B, true}, workers) : packed_workspace(p, workers);
}

// Decoding sums the products q k^T in another order than the packed backward pass. The difference
// is a relative error of the weights there, of several ulp times lse.
constexpr double kLargestDecodedLse = 128;

// `head` counts over the batch.
template <typename Real>
bool has_large_lse(const ForwardParams& p, int64_t head) {
  const Real* const row = static_cast<const Real*>(p.lse) + head * p.lse_stride;
  for (int64_t i = 0; i < p.M; ++i) {
    if (std::abs(row[i]) > kLargestDecodedLse && row[i] != kHidden<Real>) return true;
  }
  return false;
}

// Repeats heads with a large lse by the packed path. Other heads keep their results: no head's bits
// depend on another head.
template <typename Real>
void repeat_large_heads(const ForwardParams& p, const Workers& workers) {
  const int64_t heads = p.B * p.H_q;
  int64_t first = 0;
  while (first < heads && !has_large_lse<Real>(p, first)) ++first;
  if (first == heads) return;
  const size_t bytes = packed_workspace(p, workers);
  const Workspace workspace(bytes + static_cast<size_t>(heads));
  uint8_t* const selected = static_cast<uint8_t*>(workspace.data()) + bytes;
  for (int64_t n = 0; n < heads; ++n) selected[n] = has_large_lse<Real>(p, n);
  run_packed(p, workers, workspace.data(), selected);
}

void run_forward(const ForwardParams& p, const Workers& workers, void* memory) {
  if (!is_decoding(p)) return run_packed(p, workers, memory);
  run_decode({&p, p.B, true}, workers, Arena{static_cast<char*>(memory)});
  if (decodes_backward(p)) return;
  p.dtype == DType::kFloat64 ? repeat_large_heads<double>(p, workers)
                             : repeat_large_heads<float>(p, workers);
}

size_t backward_workspace(const BackwardParams& p, const Workers& workers) {
  if (decodes_backward(p)) return few_queries_workspace(p, workers);
  return workspace(p, [&](auto engine) {
    Arena arena;
    const auto w = lay_out_backward<decltype(engine)>(p, workers.count, arena);
    if (p.dbias.data) lay_out_bias_gradient(p, w, arena);
    return arena.used;
  });
}

void run_backward(const BackwardParams& p, const Workers& workers, void* memory) {
  const Arena arena{static_cast<char*>(memory)};
  if (decodes_backward(p)) return backward_few_queries(p, workers, arena);
  with_engine(p, [&](auto engine) { return backward<decltype(engine)>(p, workers, arena); });
}

bool decodes(const Problem& p) { return is_decoding(p); }

size_t sequences_workspace(const ForwardParams* sequences, int64_t count, const Workers& workers) {
  return decode_workspace({sequences, count, false}, workers);
}

void run_sequences(const ForwardParams* sequences, int64_t count, const Workers& workers,
                   void* memory) {
  run_decode({sequences, count, false}, workers, Arena{static_cast<char*>(memory)});
}

}  // namespace

const Kernels kKernels = {&choice,      &fill_block_mask,     &fill_live_keys, &forward_workspace,
                          &run_forward, &backward_workspace,  &run_backward,   &sum_key_gradients,
                          &decodes,     &sequences_workspace, &run_sequences};

}  // namespace tk::cpu::TK_ISA
