#include "cpu/driver/decode.h"

#include <vector>

#include "cpu/driver/sequences.h"

namespace tk {

namespace {

ForwardParams sequence_of(const ForwardParams& batch, const KVCache& cache, int64_t b) {
  ForwardParams p = batch;
  p.B = 1;
  p.N = cache.cache_seqlens[b];
  for (Strided* x : query_tensors(p)) advance(*x, 0, b, p.dtype);
  advance_statistics(p, b * p.H_q * p.lse_stride);
  if (cache.page_size > 0) {
    p.pages = cache.block_table + b * cache.max_pages;
    p.page_size = cache.page_size;
  } else {
    for (Strided* x : key_tensors(p)) advance(*x, 0, b, p.dtype);
  }
  align_bottom_right(p);
  return p;
}

bool pages_exist(const KVCache& cache, int64_t b) {
  const int32_t* const pages = cache.block_table + b * cache.max_pages;
  for (int64_t n = 0; n * cache.page_size < cache.cache_seqlens[b]; ++n) {
    if (pages[n] < 0 || pages[n] >= cache.pages) return false;
  }
  return true;
}

}  // namespace

bool fits(const KVCache& cache, int64_t B, int64_t N) {
  for (int64_t b = 0; b < B; ++b) {
    if (cache.cache_seqlens[b] < 0 || cache.cache_seqlens[b] > N) return false;
    if (cache.page_size > 0 && !pages_exist(cache, b)) return false;
  }
  return true;
}

void run_decode(const ForwardParams& params, const KVCache& cache) {
  const cpu::Kernels& kernels = cpu::kernels();
  ForwardParams batch = params;
  std::vector<double> lse;
  if (!batch.lse) {
    lse.resize(static_cast<size_t>(batch.B * batch.H_q * batch.M));
    batch.lse = lse.data();
  }
  std::vector<ForwardParams> sequences;
  for (int64_t b = 0; b < batch.B; ++b) sequences.push_back(sequence_of(batch, cache, b));
  if (sequences.empty() || !kernels.decodes(batch)) {
    return run_sequences<ForwardParams>(std::move(sequences),
                                        {kernels.forward_workspace, kernels.forward, &run_forward});
  }
  const cpu::Workers threads = workers();
  const Workspace workspace(kernels.decode_workspace(sequences.data(), batch.B, threads));
  kernels.decode(sequences.data(), batch.B, threads, workspace.data());
}

}  // namespace tk
