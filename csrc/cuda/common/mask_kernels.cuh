// Mask kernels that run once before the attention kernels: the block mask and live keys.
#pragma once

#include "cuda/common/masks.cuh"

namespace tk::cuda {

// Writes the block mask, (batches, heads, row_blocks, column_blocks). One warp per entry.
static TK_KERNEL(kWarp, 1) block_mask_kernel(const __grid_constant__ Problem p, int heads,
                                             int row_blocks, int column_blocks) {
  const int program = static_cast<int>(blockIdx.x);
  const int column = program % column_blocks, row = program / column_blocks % row_blocks;
  const int h = program / column_blocks / row_blocks % heads;
  const int b = program / column_blocks / row_blocks / heads;
  const int64_t j0 = column * kBlockMaskSize;
  const uint64_t all_bits = bit_range(0, min(p.N - j0, kBlockMaskSize));
  bool some = false, all = true;
  for (int r = lane_index(); r < kBlockMaskSize; r += kWarp) {
    const int64_t i = row * kBlockMaskSize + r;
    if (i >= p.M) break;
    const uint64_t bits = element_mask_bits(p.mask, p.M, p.N, b, h, i, j0);
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

constexpr int kLiveKeysThreads = 128;

// Writes live keys, (B, N): 1 if some query is in the segment of the key. One thread per key.
static TK_KERNEL(kLiveKeysThreads, 1)
    live_keys_kernel(const __grid_constant__ Problem p, uint8_t* live_keys, int blocks) {
  const int program = static_cast<int>(blockIdx.x), b = program / blocks;
  const int64_t j = program % blocks * kLiveKeysThreads + static_cast<int>(threadIdx.x);
  if (j >= p.N) return;
  const int64_t* const ids = p.mask.q_segments + b * p.M;
  const int64_t id = p.mask.k_segments[b * p.N + j];
  bool found = false;
  for (int64_t i = 0; i < p.M && !found; ++i) found = ids[i] == id;
  live_keys[b * p.N + j] = found;
}

}  // namespace tk::cuda
