// The block mask: visibility of each 64 x 64 block under the element mask (dense, layout and
// segments). Computed once, used by the forward and the backward pass.
#pragma once

#include "common/mask.h"
#include "cpu/engine/workers.h"

namespace tk::cpu::TK_ISA {

// Queries of one block, without those whose element mask equals that of the query before.
struct DistinctRows {
  int64_t rows[kBlockMaskSize];
  int64_t count = 0;
};

TK_INLINE DistinctRows distinct_rows(const MaskParams& mask, int64_t M, int64_t b, int64_t i0) {
  DistinctRows found;
  const int64_t i1 = M - i0 < kBlockMaskSize ? M : i0 + kBlockMaskSize;
  const int64_t* const ids = mask.q_segments ? mask.q_segments + b * M : nullptr;
  for (int64_t i = i0; i < i1; ++i) {
    const bool same_as_previous = i > i0 && !mask.dense && (!ids || ids[i] == ids[i - 1]) &&
                                  (!mask.layout || i % mask.block_size != 0);
    if (!same_as_previous) found.rows[found.count++] = i;
  }
  return found;
}

TK_INLINE Visible classify_block(const MaskParams& mask, int64_t M, int64_t N, int64_t b, int64_t h,
                                 const DistinctRows& rows, int64_t j0) {
  const uint64_t columns = bit_range(0, N - j0);
  uint64_t any = 0, all = columns;
  for (int64_t n = 0; n < rows.count; ++n) {
    const uint64_t bits = element_mask_bits(mask, M, N, b, h, rows.rows[n], j0);
    any |= bits;
    all &= bits;
    if (any && all != columns) return Visible::kPartial;
  }
  return all == columns ? Visible::kFull : any ? Visible::kPartial : Visible::kEmpty;
}

// B and H are the dimensions of the block mask: 1 where the mask does not depend on them.
void fill_block_mask(const MaskParams& mask, int64_t B, int64_t H, int64_t M, int64_t N,
                     const Workers& workers) {
  const int64_t row_blocks = (M + kBlockMaskSize - 1) / kBlockMaskSize;
  const int64_t column_blocks = (N + kBlockMaskSize - 1) / kBlockMaskSize;
  for_each(workers, B * H * row_blocks, [&](int64_t, int64_t item) {
    const int64_t b = item / (H * row_blocks), h = item / row_blocks % H, m = item % row_blocks;
    const DistinctRows rows = distinct_rows(mask, M, b, m * kBlockMaskSize);
    for (int64_t n = 0; n < column_blocks; ++n) {
      mask.block_mask[item * column_blocks + n] =
          static_cast<uint8_t>(classify_block(mask, M, N, b, h, rows, n * kBlockMaskSize));
    }
  });
}

}  // namespace tk::cpu::TK_ISA
