#include "varlen.h"

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "cpu/arena.h"
#include "cpu/dispatch.h"
#include "key_use.h"
#include "memory.h"
#include "run.h"

namespace tk {

namespace {

// A sequence is long if one of its heads has more than one in so many of a worker's share of all
// weights: handed out whole, it could be what the others wait for.
constexpr int64_t kItemsPerWorker = 8;

struct Sequence {
  int64_t b, i0, M, j0, N;

  int64_t weights() const { return M * N; }
};

// Behind the last sequence there may be queries without keys, and keys without queries: as two more
// sequences they get what such rows get.
std::vector<Sequence> sequences_of(const Packing& packing, int64_t M, int64_t N) {
  const int64_t B = packing.B;
  const int32_t *const q = packing.cu_seqlens_q, *const k = packing.cu_seqlens_k;
  std::vector<Sequence> sequences;
  const auto add = [&](const Sequence& s) {
    if (s.M > 0 || s.N > 0) sequences.push_back(s);
  };
  for (int64_t b = 0; b < B; ++b) add({b, q[b], q[b + 1] - q[b], k[b], k[b + 1] - k[b]});
  add({B, q[B], M - q[B], k[B], 0});
  add({B, q[B], 0, k[B], N - k[B]});
  return sequences;
}

std::array<Strided*, 2> rows_of_queries(ForwardParams& p) { return {&p.q, &p.o}; }
std::array<Strided*, 2> rows_of_keys(ForwardParams& p) { return {&p.k, &p.v}; }
std::array<Strided*, 4> rows_of_queries(BackwardParams& p) { return {&p.q, &p.o, &p.d_o, &p.dq}; }
std::array<Strided*, 4> rows_of_keys(BackwardParams& p) { return {&p.k, &p.v, &p.dk, &p.dv}; }

int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
      break;
  }
  return 8;
}

void advance(void*& data, int64_t bytes) {
  if (data) data = static_cast<char*>(data) + bytes;
}
void advance(const void*& data, int64_t bytes) {
  if (data) data = static_cast<const char*>(data) + bytes;
}

void advance_statistics(ForwardParams& p, int64_t bytes) { advance(p.lse, bytes); }
void advance_statistics(BackwardParams& p, int64_t bytes) {
  advance(p.lse, bytes);
  advance(p.dlse, bytes);
}

// One sequence with `heads` heads of k from `head` on, as a problem of its own.
template <typename Params>
Params part_of(const Params& packed, const Packing& packing, const Sequence& s, int64_t head,
               int64_t heads) {
  Params p = packed;
  const int64_t sharing = p.H_q / p.H_kv, q_head = head * sharing;
  const int64_t bytes = bytes_of(p.dtype), statistic = std::max<int64_t>(bytes, sizeof(float));
  for (Strided* x : rows_of_queries(p)) {
    advance(x->data, (q_head * x->stride[1] + s.i0 * x->stride[2]) * bytes);
  }
  for (Strided* x : rows_of_keys(p)) {
    advance(x->data, (head * x->stride[1] + s.j0 * x->stride[2]) * bytes);
  }
  advance_statistics(p, (q_head * p.lse_stride + s.i0) * statistic);
  advance(p.score.alibi_slopes, q_head * statistic);
  p.H_kv = heads;
  p.H_q = heads * sharing;
  p.M = s.M;
  p.N = s.N;
  p.dropout.first_batch = s.b;
  p.dropout.first_head = q_head;
  if (packing.from_end) {
    p.mask.diagonal_low += s.N - s.M;
    p.mask.diagonal_high += s.N - s.M;
    p.score.alibi_offset += s.N - s.M;
  }
  return p;
}

template <typename Params>
struct Pass {
  size_t (*workspace)(const Params&, const cpu::Workers&);
  void (*kernel)(const Params&, const cpu::Workers&, void* workspace);
  void (*by_all)(Params&);
};

// Every head of these sequences by one worker.
template <typename Params>
void run_side_by_side(const Params& packed, const Packing& packing, const Pass<Params>& pass,
                      std::span<const Sequence> sequences) {
  constexpr cpu::Workers kAlone{1, nullptr};
  const cpu::Workers threads = workers();
  std::vector<std::vector<uint8_t>> used;
  size_t bytes = 0;
  for (const Sequence& s : sequences) {
    const Params one = part_of(packed, packing, s, 0, 1);
    used.push_back(used_keys(one));
    bytes = std::max(bytes, pass.workspace(one, kAlone));
  }
  bytes = (bytes + cpu::kAlignment - 1) / cpu::kAlignment * cpu::kAlignment;
  const Workspace workspace(bytes * static_cast<size_t>(threads.count));
  char* const memory = static_cast<char*>(workspace.data());
  const int64_t items = static_cast<int64_t>(sequences.size()) * packed.H_kv;
  cpu::for_each(threads, items, [&](int64_t worker, int64_t item) {
    const auto n = static_cast<size_t>(item / packed.H_kv);
    Params one = part_of(packed, packing, sequences[n], item % packed.H_kv, 1);
    one.key_used = used[n].empty() ? nullptr : used[n].data();
    pass.kernel(one, kAlone, memory + static_cast<size_t>(worker) * bytes);
  });
}

// Long sequences one after the other, each by all workers; then the short ones side by side.
template <typename Params>
void run_packed(const Params& packed, const Packing& packing, const Pass<Params>& pass) {
  std::vector<Sequence> sequences = sequences_of(packing, packed.M, packed.N);
  std::stable_sort(sequences.begin(), sequences.end(),
                   [](const Sequence& a, const Sequence& b) { return a.weights() > b.weights(); });
  int64_t weights = 0;
  for (const Sequence& s : sequences) weights += s.weights();
  const int64_t most = weights / (workers().count * kItemsPerWorker) * packed.H_kv;
  const auto short_ones = std::find_if(sequences.begin(), sequences.end(),
                                       [&](const Sequence& s) { return s.weights() <= most; });
  for (auto s = sequences.begin(); s != short_ones; ++s) {
    Params whole = part_of(packed, packing, *s, 0, packed.H_kv);
    pass.by_all(whole);
  }
  run_side_by_side(packed, packing, pass, std::span(short_ones, sequences.end()));
}

bool rises_within(const int32_t* cu_seqlens, int64_t B, int64_t total) {
  return cu_seqlens[0] == 0 && std::is_sorted(cu_seqlens, cu_seqlens + B + 1) &&
         cu_seqlens[B] <= total;
}

}  // namespace

bool fits(const Packing& packing, int64_t M, int64_t N) {
  return rises_within(packing.cu_seqlens_q, packing.B, M) &&
         rises_within(packing.cu_seqlens_k, packing.B, N);
}

void run_forward(const ForwardParams& packed, const Packing& packing) {
  const cpu::Kernels& kernels = cpu::kernels();
  run_packed<ForwardParams>(packed, packing,
                            {kernels.forward_workspace, kernels.forward, &run_forward});
}

void run_backward(const BackwardParams& packed, const Packing& packing) {
  const cpu::Kernels& kernels = cpu::kernels();
  run_packed<BackwardParams>(packed, packing,
                             {kernels.backward_workspace, kernels.backward, &run_backward});
}

}  // namespace tk
