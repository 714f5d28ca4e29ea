// Keys and values that a model keeps while it writes: so many of each sequence, in order or in
// pages.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "common/tensor_view.h"

namespace tk {

struct KVCache {
  const int32_t* cache_seqlens;  // (B): positions in use; those behind them may hold anything
  int64_t page_size = 0;         // 0 = no pages: k and v are (B, H_kv, N, width)
  int64_t pages = 0;
  // (B, max_pages): position j of b is in page block_table[b, j / page_size]. Entries behind the
  // last page in use may be anything.
  const int32_t* block_table = nullptr;
  int64_t max_pages = 0;
};

// Sets sizes, strides and dtype; whether all fit together. N is what the cache has room for.
inline bool set_tensors(Problem& p, KVCache& cache, const View& q, const View& k, const View& v) {
  if (cache.page_size == 0) return set_tensors(p, q, k, v);
  cache.pages = k.size[0];
  const int64_t N = cache.page_size * cache.max_pages;
  const int64_t k_size[4] = {q.size[0], k.size[1], N, k.size[3]};
  const int64_t v_size[4] = {q.size[0], v.size[1], N, v.size[3]};
  const bool fit =
      set_tensors(p, q, {k.data, k.dtype, k_size, k.stride}, {v.data, v.dtype, v_size, v.stride});
  p.k = strided(k);
  p.v = strided(v);
  return fit && v.size[0] == cache.pages && k.size[2] == cache.page_size &&
         v.size[2] == cache.page_size;
}

}  // namespace tk
