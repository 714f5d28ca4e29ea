#include "cpu/driver/call.h"

#include <utility>

#include "cpu/driver/decode.h"
#include "cpu/driver/dense.h"
#include "cpu/driver/isa_dispatch.h"
#include "cpu/driver/varlen.h"

namespace tk {

std::vector<int32_t> read_values(Problem& p, LayoutParams& layout, const Options& options,
                                 Reason& reason) {
  if (options.seed) p.dropout.seed = *static_cast<const uint64_t*>(options.seed.data);
  if (layout.kind == LayoutKind::kVarlen) {
    std::vector<int32_t> offsets = copy_offsets(layout.varlen, IndexTensor(options.cu_seqlens_q),
                                                IndexTensor(options.cu_seqlens_k));
    if (!fits(layout.varlen, p.M, p.N)) {
      reason = "cu_seqlens must start at 0, not decrease, and end within the rows";
    } else if ((options.relative_bias || options.relative_keys) &&
               !is_bounded(layout.varlen, options.max_seqlen_q, options.max_seqlen_k)) {
      reason =
          "with relative_bias or relative_keys, no sequence may be longer than max_seqlen_q and "
          "max_seqlen_k";
    }
    return offsets;
  }
  if (layout.kind == LayoutKind::kDense) return {};
  const View& table = options.block_table;
  auto indices = copy_indices(layout.cache, p.B, p.N, IndexTensor(options.cache_seqlens),
                              table ? IndexTensor(table) : IndexTensor());
  if (indices) return *std::move(indices);
  reason = "cache_seqlens must be within the capacity, and block_table must hold existing pages";
  return {};
}

std::string describe(const Problem& p, const LayoutParams& layout) {
  Problem longest = p;
  if (layout.kind == LayoutKind::kVarlen) {
    longest.M = layout.max_seqlen_q, longest.N = layout.max_seqlen_k;
  }
  const cpu::Kernels& kernels = cpu::kernels();
  const std::string isa = std::string(", ") + kernels.name;
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
      return run_forward(params, layout.varlen);
    case LayoutKind::kCache:
      return run_decode(params, layout.cache);
  }
}

void run(BackwardParams& params, const LayoutParams& layout) {
  layout.kind == LayoutKind::kVarlen ? run_backward(params, layout.varlen) : run_backward(params);
}

}  // namespace tk
