// Runs problems of one batch entry each that differ only in their lengths. Long ones run one after
// another, each on all workers; then the heads of the short ones run concurrently, one worker each.
#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "common/workspace.h"
#include "cpu/driver/dense.h"
#include "cpu/driver/isa_dispatch.h"
#include "cpu/engine/arena.h"

namespace tk {

inline std::array<Strided*, 2> query_tensors(ForwardParams& p) { return {&p.q, &p.o}; }
inline std::array<Strided*, 2> key_tensors(ForwardParams& p) { return {&p.k, &p.v}; }
inline std::array<Strided*, 4> query_tensors(BackwardParams& p) {
  return {&p.q, &p.o, &p.d_o, &p.dq};
}
inline std::array<Strided*, 4> key_tensors(BackwardParams& p) { return {&p.k, &p.v, &p.dk, &p.dv}; }

inline int64_t bytes_of(DType dtype) {
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

inline int64_t bytes_of_statistics(DType dtype) {
  return std::max<int64_t>(bytes_of(dtype), sizeof(float));
}

inline void advance(void*& data, int64_t bytes) {
  if (data) data = static_cast<char*>(data) + bytes;
}
inline void advance(const void*& data, int64_t bytes) {
  if (data) data = static_cast<const char*>(data) + bytes;
}

// Moves the data pointer to row `row` of dimension `dimension`.
inline void advance(Strided& x, int64_t dimension, int64_t row, DType dtype) {
  advance(x.data, row * x.stride[dimension] * bytes_of(dtype));
}

inline void advance_statistics(ForwardParams& p, int64_t rows) {
  advance(p.lse, rows * bytes_of_statistics(p.dtype));
  advance(p.lse_rest, rows * bytes_of_statistics(p.dtype));
}
inline void advance_statistics(BackwardParams& p, int64_t rows) {
  advance(p.lse, rows * bytes_of_statistics(p.dtype));
  advance(p.lse_rest, rows * bytes_of_statistics(p.dtype));
  advance(p.dlse, rows * bytes_of_statistics(p.dtype));
}

inline void advance_sums(ForwardParams&, int64_t) {}
inline void advance_sums(BackwardParams& p, int64_t heads) {
  const int64_t bytes = heads * (p.M + p.N - 1) * bytes_of_statistics(p.dtype);
  advance(p.distance_sums, bytes);
  advance(p.key_sums, bytes * p.D);
}

// The problem restricted to `count` key heads from `head` on.
template <typename Params>
Params slice_heads(const Params& all, int64_t head, int64_t count) {
  Params p = all;
  const int64_t q_per_kv = p.H_q / p.H_kv, q_head = head * q_per_kv;
  for (Strided* x : query_tensors(p)) advance(*x, 1, q_head, p.dtype);
  for (Strided* x : key_tensors(p)) advance(*x, 1, head, p.dtype);
  advance_statistics(p, q_head * p.lse_stride);
  const int64_t bytes = bytes_of_statistics(p.dtype);
  advance(p.score.alibi_slopes, q_head * bytes);
  advance_sums(p, q_head);
  advance(p.score.relative_bias, q_head * p.score.relative_stride * bytes);
  advance(p.score.relative_keys, q_head * p.score.relative_keys_stride * bytes_of(p.dtype));
  p.H_kv = count;
  p.H_q = count * q_per_kv;
  p.dropout.first_head += q_head;
  return p;
}

// Moves the score options to those of sequence b, which becomes batch entry 0.
inline void advance_scores(Problem& p, int64_t b) {
  advance(p.score.alibi_slopes, b * p.score.alibi_stride * bytes_of_statistics(p.dtype));
}

// Lets k and v be the pages of sequence b. Returns false if there are no pages.
inline bool set_pages(Problem& p, const KVCache& cache, int64_t b) {
  if (cache.page_size == 0) return false;
  p.pages = cache.block_table + b * cache.max_pages;
  p.page_size = cache.page_size;
  return true;
}

// Aligns the diagonals and the distances of score options to the last key.
inline void align_bottom_right(Problem& p) {
  p.mask.diagonal_low += p.N - p.M;
  p.mask.diagonal_high += p.N - p.M;
  p.score.alibi_offset += p.N - p.M;
  p.score.relative_offset += p.N - p.M;
}

template <typename Params>
struct Pass {
  size_t (*workspace)(const Params&, const cpu::Workers&);
  void (*kernel)(const Params&, const cpu::Workers&, void* workspace);
  void (*run_on_all_workers)(Params&);
};

// Runs each head of these sequences on one worker.
template <typename Params>
void run_concurrently(std::span<const Params> sequences, int64_t heads, const Pass<Params>& pass) {
  constexpr cpu::Workers kOneWorker{1, nullptr};
  const cpu::Workers threads = workers();
  size_t bytes = 0;
  for (const Params& sequence : sequences) {
    bytes = std::max(bytes, pass.workspace(slice_heads(sequence, 0, 1), kOneWorker));
  }
  bytes = (bytes + cpu::kAlignment - 1) / cpu::kAlignment * cpu::kAlignment;
  const Workspace workspace(bytes * static_cast<size_t>(threads.count));
  char* const memory = static_cast<char*>(workspace.data());
  const int64_t items = static_cast<int64_t>(sequences.size()) * heads;
  cpu::for_each(threads, items, [&](int64_t worker, int64_t item) {
    const auto n = static_cast<size_t>(item / heads);
    const Params one = slice_heads(sequences[n], item % heads, 1);
    pass.kernel(one, kOneWorker, memory + static_cast<size_t>(worker) * bytes);
  });
}

template <typename Params>
void run_sequences(std::vector<Params> sequences, const Pass<Params>& pass) {
  // A sequence is long if one of its heads has more than 1/8 of a worker's share of all weights: as
  // a single work item it could keep the other workers waiting.
  constexpr int64_t kItemsPerWorker = 8;
  const auto weight_count = [](const Params& p) { return p.M * p.N; };
  std::stable_sort(sequences.begin(), sequences.end(), [&](const Params& a, const Params& b) {
    return weight_count(a) > weight_count(b);
  });
  int64_t total = 0;
  for (const Params& p : sequences) total += weight_count(p);
  const int64_t heads = sequences.empty() ? 1 : sequences.front().H_kv;
  const int64_t limit = total / (workers().count * kItemsPerWorker) * heads;
  const auto short_ones = std::find_if(sequences.begin(), sequences.end(),
                                       [&](const Params& p) { return weight_count(p) <= limit; });
  for (auto p = sequences.begin(); p != short_ones; ++p) pass.run_on_all_workers(*p);
  run_concurrently(std::span<const Params>(short_ones, sequences.end()), heads, pass);
}

}  // namespace tk
