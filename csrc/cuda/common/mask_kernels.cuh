// Mask kernels that run once before the attention kernels: the block mask, and the live keys, which
// follow from it.
#pragma once

#include "cuda/common/masks.cuh"

namespace tk::cuda {

// Extremes over the lanes of a warp.
TK_DEVICE Extremes warp_extremes(Extremes x) {
  for (int distance = 1; distance < kWarp; distance *= 2) {
    include(x, Extremes{__shfl_xor_sync(~0u, x.least, distance),
                        __shfl_xor_sync(~0u, x.greatest, distance)});
  }
  return x;
}

// Visibility of the block at (i0, j0) under the position tests alone, from the extremes of its
// positions; kPartial if the elements decide. Called by a whole warp.
TK_DEVICE Visible classify_by_extremes(const Problem& p, int b, int h, int64_t i0, int64_t j0) {
  Visible entry = Visible::kFull;
  for (int64_t n = 0; n < p.mask.tests && entry != Visible::kEmpty; ++n) {
    const int64_t row = position_offset(p.mask.q_position_stride, n, b, h);
    const int64_t column = position_offset(p.mask.k_position_stride, n, b, h);
    Intervals queries;
    Extremes keys;
    for (int r = lane_index(); r < kBlockMaskSize; r += kWarp) {
      if (i0 + r < p.M) include(queries, p.mask.q_low[row + i0 + r], p.mask.q_high[row + i0 + r]);
      const int64_t j = min(j0 + r, p.N - 1);
      include(keys, Extremes{p.mask.k_position[column + j], p.mask.k_position[column + j]});
    }
    queries.low = warp_extremes(queries.low);
    queries.high = warp_extremes(queries.high);
    queries.some_wrap = __any_sync(~0u, queries.some_wrap);
    queries.all_wrap = __all_sync(~0u, queries.all_wrap);
    const Visible one = visible_by_extremes(queries, warp_extremes(keys));
    entry = one < entry ? one : entry;
  }
  return entry;
}

// Writes the block mask, (batches, heads, row_blocks, column_blocks). One warp per entry.
static TK_KERNEL(kWarp, 1) block_mask_kernel(const __grid_constant__ Problem p, int heads,
                                             int row_blocks, int column_blocks) {
  const int program = static_cast<int>(blockIdx.x);
  const int column = program % column_blocks, row = program / column_blocks % row_blocks;
  const int h = program / column_blocks / row_blocks % heads;
  const int b = program / column_blocks / row_blocks / heads;
  const int64_t i0 = row * kBlockMaskSize, j0 = column * kBlockMaskSize;
  const Visible entry = classify_by_extremes(p, b, h, i0, j0);
  const bool decides = !has_other_elements(p.mask);
  if (entry == Visible::kEmpty || (entry == Visible::kFull && decides)) {
    if (lane_index() == 0) p.mask.block_mask[program] = static_cast<uint8_t>(entry);
    return;
  }
  const uint64_t all_bits = bit_range(0, min(p.N - j0, kBlockMaskSize));
  bool some = false, all = true;
  for (int r = lane_index(); r < kBlockMaskSize; r += kWarp) {
    if (i0 + r >= p.M) break;
    const uint64_t bits = element_mask_bits(p.mask, p.N, b, h, i0 + r, j0);
    some |= bits != 0;
    all &= bits == all_bits;
  }
  some = __any_sync(~0u, some);
  all = __all_sync(~0u, all);
  if (lane_index() == 0) {
    p.mask.block_mask[program] = static_cast<uint8_t>(all    ? Visible::kFull
                                                      : some ? Visible::kPartial
                                                             : Visible::kEmpty);
  }
}

constexpr int kLiveKeysWarps = 8;

// Bitwise or over the lanes of a warp.
TK_DEVICE uint64_t warp_or(uint64_t x) {
  for (int distance = 1; distance < kWarp; distance *= 2) x |= __shfl_xor_sync(~0u, x, distance);
  return x;
}

// Bit c: key j0 + c is visible to some query of head h. Of the query blocks, each warp of the CTA
// tests a share: first one per lane by the block mask, then the elements of partial blocks.
TK_DEVICE uint64_t live_keys_of_block(const Problem& p, int64_t b, int64_t h, int64_t j0,
                                      int64_t j1) {
  const uint64_t all = bit_range(0, j1 - j0);
  const QueryInterval queries = block_queries(p.mask, j0, j1);
  const int64_t row_blocks = (min(queries.end, p.M) + kBlockMaskSize - 1) / kBlockMaskSize;
  int64_t first = max(queries.begin, int64_t{0}) / kBlockMaskSize + warp_index();
  uint64_t live = 0;
  for (; first < row_blocks; first += kWarp * kLiveKeysWarps) {
    const int64_t own = (first + lane_index() * kLiveKeysWarps) * kBlockMaskSize;
    const Visible visible =
        own < p.M ? block_visible(p.mask, p.N, b, h, own, min(own + kBlockMaskSize, p.M), j0, j1)
                  : Visible::kEmpty;
    if (__any_sync(~0u, visible == Visible::kFull)) return all;
    unsigned partial = __ballot_sync(~0u, visible == Visible::kPartial);
    for (; partial && live != all; partial &= partial - 1) {
      const int lane = __ffs(static_cast<int>(partial)) - 1;
      const int64_t i0 = (first + lane * kLiveKeysWarps) * kBlockMaskSize;
      uint64_t bits = 0;
      for (int64_t i = i0 + lane_index(); i < min(i0 + kBlockMaskSize, p.M); i += kWarp) {
        bits |= visible_keys(p.mask, p.N, b, h, i, j0);
      }
      live |= warp_or(bits);
    }
  }
  return live;
}

// Writes live keys; the strides of p are set. p has no key ranges: they hide a key from every query
// or from none. One CTA for kBlockMaskSize keys of a key head.
static TK_KERNEL(kLiveKeysWarps* kWarp, 1)
    live_keys_kernel(const __grid_constant__ Problem p, uint8_t* live_keys, int column_blocks) {
  const int program = static_cast<int>(blockIdx.x), item = program / column_blocks;
  const int64_t j0 = program % column_blocks * kBlockMaskSize;
  const int64_t j1 = min(j0 + kBlockMaskSize, p.N);
  const bool by_head = p.live_keys_stride[1] != 0;
  const int H = by_head ? static_cast<int>(p.H_kv) : 1;
  const int heads = by_head ? static_cast<int>(p.H_q) / H : 1;  // query heads that may differ
  uint64_t live = 0;
  for (int h = item % H * heads; h < (item % H + 1) * heads; ++h) {
    live |= live_keys_of_block(p, item / H, h, j0, j1);
  }
  TK_SHARED_MEMORY(memory);
  uint64_t* const parts = reinterpret_cast<uint64_t*>(memory);  // (warps)
  if (lane_index() == 0) parts[warp_index()] = live;
  __syncthreads();
  const int64_t j = j0 + static_cast<int>(threadIdx.x);
  if (j >= j1) return;
  for (int n = 0; n < kLiveKeysWarps; ++n) live |= parts[n];
  live_keys[item * p.N + j] = live >> (j - j0) & 1;
}

}  // namespace tk::cuda
