// Decoding from a key/value cache: attention of each sequence's last M queries.
#pragma once

#include "common/kv_cache.h"
#include "common/params.h"

namespace tk {

// True if every sequence length is within N and every page in use exists.
bool fits(const KVCache& cache, int64_t B, int64_t N);

// `batch` describes all sequences; its N is the capacity of the cache. Each sequence's own N - M is
// added to the diagonals and the ALiBi offset. A null lse skips the log-sum-exp output.
void run_decode(const ForwardParams& batch, const KVCache& cache);

}  // namespace tk
