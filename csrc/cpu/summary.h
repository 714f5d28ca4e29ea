// The block summary: what dense masks, layouts and segments leave of each block, found once and
// used by the forward and the backward pass.
#pragma once

#include "../mask.h"
#include "workers.h"

namespace tk::cpu::TK_ISA {

TK_INLINE Visible summarize_block(const MaskParams& mask, int64_t M, int64_t N, int64_t b,
                                  int64_t h, int64_t i0, int64_t j0) {
  const int64_t i1 = M - i0 < kSummaryBlock ? M : i0 + kSummaryBlock;
  const uint64_t columns = bit_range(0, N - j0);
  uint64_t any = 0, all = columns;
  int64_t layout_row_end = 0;  // rows before it have the layout's row of the one before them
  for (int64_t i = i0; i < i1; ++i) {
    const bool same_ids = !mask.q_segments ||
                          (i > i0 && mask.q_segments[b * M + i] == mask.q_segments[b * M + i - 1]);
    if (i > i0 && !mask.dense && same_ids && (!mask.layout || i < layout_row_end)) continue;
    if (mask.layout) layout_row_end = (i / mask.block_size + 1) * mask.block_size;
    const uint64_t bits = flag_bits(mask, M, N, b, h, i, j0);
    any |= bits;
    all &= bits;
    if (any && all != columns) return Visible::kSome;
  }
  return all == columns ? Visible::kAll : any ? Visible::kSome : Visible::kNone;
}

// B and H are the summary's own: 1 where nothing in the mask depends on them.
void summarize(const MaskParams& mask, int64_t B, int64_t H, int64_t M, int64_t N,
               const Workers& workers) {
  const int64_t row_blocks = (M + kSummaryBlock - 1) / kSummaryBlock;
  const int64_t column_blocks = (N + kSummaryBlock - 1) / kSummaryBlock;
  for_each(workers, B * H * row_blocks, [&](int64_t, int64_t item) {
    const int64_t b = item / (H * row_blocks), h = item / row_blocks % H, m = item % row_blocks;
    for (int64_t n = 0; n < column_blocks; ++n) {
      mask.summary[item * column_blocks + n] = static_cast<uint8_t>(
          summarize_block(mask, M, N, b, h, m * kSummaryBlock, n * kSummaryBlock));
    }
  });
}

}  // namespace tk::cpu::TK_ISA
