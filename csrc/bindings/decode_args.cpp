#include "bindings/decode_args.h"

#include <algorithm>
#include <array>

#include "common/mask.h"

namespace tk {

namespace {

const int32_t* indices(const Tensor& x, int64_t dimensions, int64_t B, const Device& device) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Int && is_on(x, device) && x.is_contiguous() &&
                      x.dim() == dimensions && x.size(0) == B,
                  "cache_seqlens and block_table must be int32, with one row per sequence");
  return static_cast<const int32_t*>(data_of(x));
}

const void* slopes_of(const Tensor& x, const Problem& p, const Device& device) {
  const bool double_wanted = p.dtype == DType::kFloat64;
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) == p.H_q && is_on(x, device) &&
                      x.scalar_type() == (double_wanted ? ScalarType::Double : ScalarType::Float),
                  "the ALiBi slopes do not fit the problem");
  return data_of(x);
}

}  // namespace

DecodeArgs::DecodeArgs(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                       TK_DECODE_OPTIONS)
    : device(device_of(q)),
      cache_seqlens(checked_contiguous(cache_seqlens)),
      block_table(checked_contiguous(block_table)),
      alibi_slopes(checked_contiguous(alibi_slopes)),
      o(empty_like_layout(q, v_cache.size(-1), device)),
      lse(empty(q.sizes().slice(0, 3), statistics_dtype(q), device)) {
  const View queries = view(q, device);
  cache.cache_seqlens = indices(this->cache_seqlens, 1, queries.size[0], device);
  if (this->block_table) {
    cache.block_table = indices(*this->block_table, 2, queries.size[0], device);
    cache.max_pages = this->block_table->size(1);
    cache.page_size = k_cache.size(2);
    STD_TORCH_CHECK(cache.page_size > 0, "the page size of the cache must be at least 1");
  }
  STD_TORCH_CHECK(set_tensors(params, cache, queries, view(k_cache, device), view(v_cache, device)),
                  "q and the caches do not fit together");
  params.mask.diagonal_low = std::clamp(diagonal_low, -kUnbounded, kUnbounded);
  params.mask.diagonal_high = std::clamp(diagonal_high, -kUnbounded, kUnbounded);
  params.score.scale = scale;
  params.score.softcap = softcap;
  if (this->alibi_slopes) {
    params.score.alibi_slopes = slopes_of(*this->alibi_slopes, params, device);
  }
  params.o = strided(o, device);
  params.lse = lse.data_ptr();
}

}  // namespace tk
