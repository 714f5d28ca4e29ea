#include "cpu/driver/call.h"

#include <utility>

#include "cpu/driver/decode.h"
#include "cpu/driver/dense.h"
#include "cpu/driver/isa_dispatch.h"
#include "cpu/driver/varlen.h"

namespace tk {

namespace {

Reason read_packed(const Problem& p, LayoutParams& layout, const Options& options,
                   Indices& indices) {
  Varlen& varlen = layout.varlen;
  indices.lengths =
      copy_offsets(varlen, IndexTensor(options.cu_seqlens_q), IndexTensor(options.cu_seqlens_k));
  const bool is_paged = layout.has_packed_pages();
  if (!fits(varlen, p.M, is_paged ? INT32_MAX : p.N)) {
    return "cu_seqlens must start at 0, not decrease, and end within the rows";
  }
  if ((options.relative_bias || options.relative_keys) &&
      !is_bounded(varlen, options.max_seqlen_q, options.max_seqlen_k)) {
    return "with relative_bias or relative_keys, no sequence may be longer than max_seqlen_q and "
           "max_seqlen_k";
  }
  if (!is_paged) return {};
  std::vector<int32_t> lengths;
  for (int64_t b = 0; b < varlen.B; ++b) {
    lengths.push_back(varlen.cu_seqlens_k[b + 1] - varlen.cu_seqlens_k[b]);
  }
  auto pages = is_bounded(varlen, INT32_MAX, p.N)
                   ? copy_pages(layout.cache, lengths, IndexTensor(options.block_table))
                   : std::nullopt;
  if (!pages) return "block_table must hold existing pages for all keys";
  indices.pages = *std::move(pages);
  return {};
}

Reason read_cache(const Problem& p, KVCache& cache, const Options& options, Indices& indices) {
  const View& table = options.block_table;
  auto lengths = copy_lengths(cache, p.B, p.N, IndexTensor(options.cache_seqlens));
  auto pages = lengths ? copy_pages(cache, *lengths, table ? IndexTensor(table) : IndexTensor())
                       : std::nullopt;
  if (!pages) {
    return "cache_seqlens must be within the capacity, and block_table must hold existing pages";
  }
  indices = {*std::move(lengths), *std::move(pages)};
  return {};
}

}  // namespace

Indices read_values(Problem& p, LayoutParams& layout, const Options& options, Reason& reason) {
  if (options.seed) p.dropout.seed = *static_cast<const uint64_t*>(options.seed.data);
  Indices indices;
  if (layout.kind == LayoutKind::kVarlen) reason = read_packed(p, layout, options, indices);
  if (layout.kind == LayoutKind::kCache) reason = read_cache(p, layout.cache, options, indices);
  return indices;
}

std::string describe(const Problem& p, const LayoutParams& layout) {
  Problem longest = p;
  if (layout.kind == LayoutKind::kVarlen) {
    longest.M = layout.max_seqlen_q, longest.N = layout.max_seqlen_k;
  }
  const cpu::Kernels& kernels = cpu::kernels(p.dtype);
  const std::string isa = ", " + cpu::isa();
  const char* const real = p.dtype == DType::kFloat64 ? " in float64" : " in float32";
  if (kernels.decodes(longest)) {
    return "csrc/cpu/attention/decode.h" + isa + (p.is_int8 ? ", int8 caches," : ",") + real;
  }
  const auto [engine, queries, keys] = kernels.choice(longest);
  return "csrc/cpu/attention/forward.h" + isa + ", " + engine + real + ", tiles of " +
         std::to_string(queries) + " x " + std::to_string(keys);
}

void run(ForwardParams& params, const LayoutParams& layout) {
  switch (layout.kind) {
    case LayoutKind::kDense:
      return run_forward(params);
    case LayoutKind::kVarlen:
      return run_forward(params, layout.varlen, layout.cache);
    case LayoutKind::kCache:
      return run_decode(params, layout.cache);
  }
}

void run(BackwardParams& params, const LayoutParams& layout) {
  layout.kind == LayoutKind::kVarlen ? run_backward(params, layout.varlen) : run_backward(params);
}

}  // namespace tk
