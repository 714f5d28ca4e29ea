// Key/value cache of a decoding model: contiguous (B, H_kv, capacity, width) or paged.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/params.h"
#include "common/tensor_view.h"

namespace tk {

struct KVCache {
  const int32_t* cache_seqlens;  // (B): valid positions per sequence; later ones are undefined
  int64_t page_size = 0;         // 0: not paged, k and v are (B, H_kv, N, width)
  int64_t pages = 0;
  // (B, max_pages): position j of sequence b is in page block_table[b, j / page_size]. Entries past
  // the last page in use may hold anything.
  const int32_t* block_table = nullptr;
  int64_t max_pages = 0;
};

// Fills in sizes, strides and dtype; N is the capacity of the cache. Returns false if the shapes or
// dtypes do not match.
inline bool set_tensors(Problem& p, KVCache& cache, const View& q, const View& k, const View& v) {
  if (cache.page_size == 0) return set_tensors(p, q, k, v);
  cache.pages = k.size[0];
  if (cache.page_size > INT64_MAX / std::max<int64_t>(cache.max_pages, 1)) return false;
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
