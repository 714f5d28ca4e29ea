#include "cpu/driver/decode.h"

#include <algorithm>

#include "cpu/driver/sequences.h"

namespace tk {

namespace {

ForwardParams sequence_of(const ForwardParams& batch, const KVCache& cache, int64_t b) {
  ForwardParams p = batch;
  p.B = 1;
  p.N = cache.cache_seqlens[b];
  for (Strided* x : query_tensors(p)) advance(*x, 0, b, p.dtype);
  advance_statistics(p, b * p.H_q * p.lse_stride);
  advance_scores(p, b);
  if (p.mask.key_start) p.mask.key_start += b;
  if (p.mask.key_end) p.mask.key_end += b;
  if (!set_pages(p, cache, b)) {
    for (Strided* x : key_tensors(p)) {
      p.is_int8 ? advance(x->data, b * x->stride[0]) : advance(*x, 0, b, p.dtype);
    }
    for (Strided* x : {&p.k_scale, &p.v_scale}) advance(*x, 0, b, DType::kFloat32);
  }
  if (cache.bottom_right) align_bottom_right(p);
  return p;
}

// Copies the bounds of key ranges, if there are any, and lets `bounds` refer to the copy.
std::vector<int64_t> copied(const int64_t*& bounds, int64_t B) {
  if (!bounds) return {};
  std::vector<int64_t> copy(bounds, bounds + B);
  bounds = copy.data();
  return copy;
}

}  // namespace

std::optional<std::vector<int32_t>> copy_lengths(KVCache& cache, int64_t B, int64_t N,
                                                 const IndexTensor& cache_seqlens) {
  std::vector<int32_t> copy(static_cast<size_t>(B));
  for (int64_t b = 0; b < B; ++b) {
    const int64_t length = cache_seqlens.at(b, 0);
    if (length < 0 || length > N || length > INT32_MAX) return {};
    copy[static_cast<size_t>(b)] = static_cast<int32_t>(length);
  }
  cache.cache_seqlens = copy.data();
  return copy;
}

std::optional<std::vector<int32_t>> copy_pages(KVCache& cache, std::span<const int32_t> lengths,
                                               const IndexTensor& block_table) {
  if (cache.page_size == 0) return std::vector<int32_t>();
  const auto pages_of = [&](int64_t length) {
    return length / cache.page_size + (length % cache.page_size != 0);
  };
  cache.max_pages =
      pages_of(lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end()));
  std::vector<int32_t> copy(lengths.size() * static_cast<size_t>(cache.max_pages));
  int32_t* pages = copy.data();
  for (size_t b = 0; b < lengths.size(); ++b, pages += cache.max_pages) {
    const int64_t used = pages_of(lengths[b]);
    for (int64_t n = 0; n < used; ++n) {
      const int64_t page = block_table.at(static_cast<int64_t>(b), n);
      if (page < 0 || page >= cache.pages || page > INT32_MAX) return {};
      pages[n] = static_cast<int32_t>(page);
    }
  }
  cache.block_table = copy.data();
  return copy;
}

void run_decode(const ForwardParams& params, const KVCache& cache) {
  if (params.M == 0) return;
  const cpu::Kernels& kernels = cpu::kernels(params.dtype);
  ForwardParams batch = params;
  bool scales_are_valid = true;
  batch.scales_are_valid = &scales_are_valid;
  std::vector<double> lse;
  if (!batch.lse) {
    lse.resize(static_cast<size_t>(batch.B * batch.H_q * batch.M));
    batch.lse = lse.data();
  }
  // Copies: another thread may write them between the layout of the workspace and the kernels.
  const std::vector<int64_t> start = copied(batch.mask.key_start, batch.B);
  const std::vector<int64_t> end = copied(batch.mask.key_end, batch.B);
  std::vector<ForwardParams> sequences;
  for (int64_t b = 0; b < batch.B; ++b) sequences.push_back(sequence_of(batch, cache, b));
  if (sequences.empty() || !kernels.decodes(batch)) {
    return run_sequences<ForwardParams>(std::move(sequences),
                                        {kernels.forward_workspace, kernels.forward, &run_forward});
  }
  const cpu::Workers threads = workers();
  const Workspace workspace(kernels.decode_workspace(sequences.data(), batch.B, threads));
  kernels.decode(sequences.data(), batch.B, threads, workspace.data());
  if (!scales_are_valid) throw InvalidScale();
}

}  // namespace tk
