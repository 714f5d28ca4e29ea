#include "cpu/driver/relative_gradient.h"

#include <algorithm>

#include "cpu/driver/dense.h"
#include "cpu/driver/sequences.h"

namespace tk {

namespace {

// Distances of a problem whose sums the kernels write.
int64_t distances_of(const BackwardParams& p) { return p.M == 0 || p.N == 0 ? 0 : p.M + p.N - 1; }

// Row `row` of drelative_bias: the sum over sequences, and over heads if they share the table.
template <typename Real>
void sum_row(const BackwardParams& call, std::span<const BackwardParams> sequences, int64_t row) {
  const bool is_shared = call.score.relative_stride == 0;
  std::vector<double> total(static_cast<size_t>(call.score.distances));
  for (const BackwardParams& p : sequences) {
    const int64_t count = distances_of(p);
    double* const to = total.data() + p.score.relative_offset - (p.N - 1);
    for (int64_t n = is_shared ? 0 : row; n < p.B * p.H_q; n += is_shared ? 1 : p.H_q) {
      const Real* const from = static_cast<const Real*>(p.distance_sums) + n * count;
      for (int64_t e = 0; e < count; ++e) to[e] += static_cast<double>(from[e]);
    }
  }
  std::copy(total.begin(), total.end(),
            static_cast<Real*>(call.drelative_bias) + row * call.score.distances);
}

// Bytes of the sums of one problem.
int64_t bias_bytes(const BackwardParams& p) {
  if (!p.drelative_bias) return 0;
  return p.B * p.H_q * distances_of(p) * bytes_of_statistics(p.dtype);
}
int64_t key_bytes(const BackwardParams& p) {
  if (!p.drelative_keys) return 0;
  return p.B * p.H_q * distances_of(p) * p.D * bytes_of_statistics(p.dtype);
}

}  // namespace

DistanceSums allocate_distance_sums(std::span<BackwardParams> problems) {
  int64_t bytes = 0;
  for (const BackwardParams& p : problems) bytes += bias_bytes(p) + key_bytes(p);
  DistanceSums sums(new char[static_cast<size_t>(bytes)]);
  char* next = sums.get();
  for (BackwardParams& p : problems) {
    if (bias_bytes(p) > 0) p.distance_sums = next;
    next += bias_bytes(p);
    if (key_bytes(p) > 0) p.key_sums = next;
    next += key_bytes(p);
  }
  return sums;
}

void sum_distances(const BackwardParams& call, std::span<const BackwardParams> sequences) {
  if (call.drelative_keys) {
    cpu::kernels(call.dtype).sum_key_gradients(call, sequences, workers());
  }
  if (!call.drelative_bias) return;
  const int64_t rows = call.score.relative_stride == 0 ? 1 : call.H_q;
  cpu::for_each(workers(), rows, [&](int64_t, int64_t row) {
    call.dtype == DType::kFloat64 ? sum_row<double>(call, sequences, row)
                                  : sum_row<float>(call, sequences, row);
  });
}

}  // namespace tk
