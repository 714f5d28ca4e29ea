// Attention of each sequence's last M queries to its keys in a cache.
#pragma once

#include "common/kv_cache.h"
#include "common/params.h"

namespace tk {

// Whether every position in use lies within N, and in a page that there is.
bool fits(const KVCache& cache, int64_t B, int64_t N);

// `batch` has all sequences; its N is what the cache has room for. Diagonals and ALiBi count from
// each one's own N - M, as if added to them. A batch without lse wants none.
void run_decode(const ForwardParams& batch, const KVCache& cache);

}  // namespace tk
