// The block summary: what dense masks, layouts and segments leave of each block, found once and
// used by the forward and the backward pass.
#pragma once

#include "../mask.h"
#include "workers.h"

namespace tk::cpu::TK_ISA {

TK_INLINE Visible summarize_block(const MaskParams& mask, int64_t M, int64_t N, int64_t b,
                                  int64_t h, int64_t i0, int64_t j0) {
  const int64_t rows = M - i0 < kSummaryBlock ? M - i0 : kSummaryBlock;
  const int64_t columns = N - j0 < kSummaryBlock ? N - j0 : kSummaryBlock;
  uint8_t any = 0, all = 1;
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t flags[kSummaryBlock];
    row_flags(mask, M, N, b, h, i0 + r, j0, columns, flags);
    for (int64_t c = 0; c < columns; ++c) {
      any |= flags[c];
      all &= flags[c];
    }
    if (any && !all) return Visible::kSome;
  }
  return all ? Visible::kAll : any ? Visible::kSome : Visible::kNone;
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
