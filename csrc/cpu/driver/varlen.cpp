#include "cpu/driver/varlen.h"

#include <algorithm>

#include "cpu/driver/relative_gradient.h"
#include "cpu/driver/sequences.h"

namespace tk {

namespace {

// Sequence b: M queries from row i0 on, N keys from row j0 on or in pages.
template <typename Params>
Params sequence_of(const Params& packed, const Varlen& varlen, const KVCache& cache, int64_t b,
                   int64_t i0, int64_t M, int64_t j0, int64_t N) {
  Params p = packed;
  for (Strided* x : query_tensors(p)) advance(*x, 2, i0, p.dtype);
  if (!set_pages(p, cache, b)) {
    for (Strided* x : key_tensors(p)) advance(*x, 2, j0, p.dtype);
  }
  advance_statistics(p, i0);
  if (b < varlen.B) advance_scores(p, b);
  p.M = M;
  p.N = N;
  p.dropout.first_batch = b;
  if (varlen.bottom_right) align_bottom_right(p);
  return p;
}

// Rows past the last sequence (trailing padding) form two more sequences: queries without keys, and
// keys without queries.
template <typename Params>
std::vector<Params> sequences_of(const Params& packed, const Varlen& varlen,
                                 const KVCache& cache = {}) {
  const int64_t B = varlen.B;
  const int32_t *const q = varlen.cu_seqlens_q, *const k = varlen.cu_seqlens_k;
  std::vector<Params> sequences;
  const auto add = [&](int64_t b, int64_t i0, int64_t M, int64_t j0, int64_t N) {
    if (M == 0 && N == 0) return;
    sequences.push_back(sequence_of(packed, varlen, cache, b, i0, M, j0, N));
  };
  for (int64_t b = 0; b < B; ++b) add(b, q[b], q[b + 1] - q[b], k[b], k[b + 1] - k[b]);
  add(B, q[B], packed.M - q[B], k[B], 0);
  if (cache.page_size == 0) add(B, q[B], 0, k[B], packed.N - k[B]);
  return sequences;
}

}  // namespace

bool are_valid_offsets(const int32_t* cu_seqlens, int64_t B, int64_t total) {
  return cu_seqlens[0] == 0 && std::is_sorted(cu_seqlens, cu_seqlens + B + 1) &&
         cu_seqlens[B] <= total;
}

std::vector<int32_t> copy_offsets(Varlen& varlen, const IndexTensor& q, const IndexTensor& k) {
  std::vector<int32_t> copy;
  copy.reserve(static_cast<size_t>(2 * (varlen.B + 1)));
  for (const IndexTensor* from : {&q, &k}) {
    for (int64_t b = 0; b <= varlen.B; ++b) copy.push_back(static_cast<int32_t>(from->at(b, 0)));
  }
  varlen.cu_seqlens_q = copy.data();
  varlen.cu_seqlens_k = copy.data() + varlen.B + 1;
  return copy;
}

bool fits(const Varlen& varlen, int64_t M, int64_t N) {
  return are_valid_offsets(varlen.cu_seqlens_q, varlen.B, M) &&
         are_valid_offsets(varlen.cu_seqlens_k, varlen.B, N);
}

bool is_bounded(const Varlen& varlen, int64_t max_M, int64_t max_N) {
  const int32_t *const q = varlen.cu_seqlens_q, *const k = varlen.cu_seqlens_k;
  for (int64_t b = 0; b < varlen.B; ++b) {
    if (q[b + 1] - q[b] > max_M || k[b + 1] - k[b] > max_N) return false;
  }
  return true;
}

void run_forward(const ForwardParams& packed, const Varlen& varlen, const KVCache& cache) {
  const cpu::Kernels& kernels = cpu::kernels(packed.dtype);
  run_sequences<ForwardParams>(sequences_of(packed, varlen, cache),
                               {kernels.forward_workspace, kernels.forward, &run_forward});
}

void run_backward(const BackwardParams& packed, const Varlen& varlen) {
  const cpu::Kernels& kernels = cpu::kernels(packed.dtype);
  std::vector<BackwardParams> sequences = sequences_of(packed, varlen);
  const DistanceSums sums = allocate_distance_sums(sequences);
  // Written once, below.
  for (BackwardParams& p : sequences) p.drelative_bias = p.drelative_keys = nullptr;
  run_sequences<BackwardParams>(sequences,
                                {kernels.backward_workspace, kernels.backward, &run_backward});
  sum_distances(packed, sequences);
}

}  // namespace tk
