// What is computed of a mask once, before the other kernels run.
#pragma once

#include "cuda/common/masks.cuh"

namespace tk::cuda {

// The block mask, (batches, heads, row blocks, column blocks): a warp for each entry.
static TK_KERNEL(kWarp, 1) block_mask_kernel(const __grid_constant__ Problem p, int heads,
                                             int row_blocks, int column_blocks) {
  const int program = static_cast<int>(blockIdx.x);
  const int column = program % column_blocks, row = program / column_blocks % row_blocks;
  const int h = program / column_blocks / row_blocks % heads;
  const int b = program / column_blocks / row_blocks / heads;
  const int64_t j0 = column * kBlockMaskSize;
  const uint64_t every = bit_range(0, min(p.N - j0, kBlockMaskSize));
  bool some = false, all = true;
  for (int r = lane_index(); r < kBlockMaskSize; r += kWarp) {
    const int64_t i = row * kBlockMaskSize + r;
    if (i >= p.M) break;
    const uint64_t bits = flag_bits(p.mask, p.M, p.N, b, h, i, j0);
    some |= bits != 0;
    all &= bits == every;
  }
  some = __any_sync(~0u, some);
  all = __all_sync(~0u, all);
  if (lane_index() == 0) {
    p.mask.block_mask[program] = static_cast<uint8_t>(all    ? Visible::kAll
                                                      : some ? Visible::kSome
                                                             : Visible::kNone);
  }
}

constexpr int kUseThreads = 128;

// (B, N): whether segments show a key to some query. A thread for each key.
static TK_KERNEL(kUseThreads, 1)
    live_keys_kernel(const __grid_constant__ Problem p, uint8_t* used, int blocks) {
  const int program = static_cast<int>(blockIdx.x), b = program / blocks;
  const int64_t j = program % blocks * kUseThreads + static_cast<int>(threadIdx.x);
  if (j >= p.N) return;
  const int64_t* const ids = p.mask.q_segments + b * p.M;
  const int64_t id = p.mask.k_segments[b * p.N + j];
  bool found = false;
  for (int64_t i = 0; i < p.M && !found; ++i) found = ids[i] == id;
  used[b * p.N + j] = found;
}

}  // namespace tk::cuda
