// Decoding from a key/value cache: attention of each sequence's last M queries.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

#include "common/params.h"
#include "cpu/driver/index_tensor.h"

namespace tk {

// Copies cache_seqlens, and makes `cache` refer to the copy: another thread may write the tensor
// between the check and the use. Returns nothing if a length is not within N.
std::optional<std::vector<int32_t>> copy_lengths(KVCache& cache, int64_t B, int64_t N,
                                                 const IndexTensor& cache_seqlens);

// Likewise the part of the block table that sequences of these lengths use; no part of it if there
// are no pages. Returns nothing if a page in use does not exist.
std::optional<std::vector<int32_t>> copy_pages(KVCache& cache, std::span<const int32_t> lengths,
                                               const IndexTensor& block_table);

struct InvalidScale : std::runtime_error {
  InvalidScale()
      : std::runtime_error(
            "k_scale and v_scale must be finite and not negative where keys are in use") {}
};

// `batch` describes all sequences; its N is the capacity of the cache. A null lse skips the
// log-sum-exp output. Throws InvalidScale after the kernels.
void run_decode(const ForwardParams& batch, const KVCache& cache);

}  // namespace tk
