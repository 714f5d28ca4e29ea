// The block mask: visibility of each 64 x 64 block under the element mask. Computed once,
// used by the forward and the backward pass. Each pass derives the live keys from it.
#pragma once

#include <algorithm>

#include "cpu/attention/selected.h"
#include "cpu/engine/workers.h"

namespace tk::cpu::TK_ISA {

// Queries of one block, without those whose element mask equals that of the query before.
struct DistinctRows {
  int64_t rows[kBlockMaskSize];
  int64_t count = 0;
};

TK_INLINE DistinctRows distinct_rows(const MaskParams& mask, int64_t M, int64_t b, int64_t h,
                                     int64_t i0) {
  DistinctRows found;
  const int64_t i1 = M - i0 < kBlockMaskSize ? M : i0 + kBlockMaskSize;
  for (int64_t i = i0; i < i1; ++i) {
    const bool is_known = i > i0 && !mask.selected && equals_previous_row(mask, b, h, i);
    if (!is_known) found.rows[found.count++] = i;
  }
  return found;
}

TK_INLINE Visible classify_block(const MaskParams& mask, int64_t N, int64_t b, int64_t h,
                                 const DistinctRows& rows, int64_t j0) {
  const uint64_t columns = bit_range(0, N - j0);
  uint64_t any = 0, all = columns;
  for (int64_t n = 0; n < rows.count; ++n) {
    const uint64_t bits = element_bits(mask, N, b, h, rows.rows[n], j0);
    any |= bits;
    all &= bits;
    if (any && all != columns) return Visible::kPartial;
  }
  return all == columns ? Visible::kFull : any ? Visible::kPartial : Visible::kEmpty;
}

// Visibility of a row of blocks under the position tests alone, from the extremes of each block's
// positions; kPartial where the elements decide.
TK_INLINE void classify_by_extremes(const MaskParams& mask, int64_t M, int64_t N, int64_t b,
                                    int64_t h, int64_t i0, uint8_t* entries) {
  const int64_t column_blocks = (N + kBlockMaskSize - 1) / kBlockMaskSize;
  std::fill_n(entries, column_blocks, static_cast<uint8_t>(Visible::kFull));
  for (int64_t n = 0; n < mask.tests; ++n) {
    const int64_t row = position_offset(mask.q_position_stride, n, b, h);
    const int64_t column = position_offset(mask.k_position_stride, n, b, h);
    Intervals queries;
    for (int64_t i = i0; i < std::min(M, i0 + kBlockMaskSize); ++i) {
      include(queries, mask.q_low[row + i], mask.q_high[row + i]);
    }
    for (int64_t m = 0; m < column_blocks; ++m) {
      Extremes keys;
      const int64_t j1 = std::min(N, (m + 1) * kBlockMaskSize);
      for (int64_t j = m * kBlockMaskSize; j < j1; ++j) {
        const int64_t position = mask.k_position[column + j];
        include(keys, Extremes{position, position});
      }
      const auto entry = static_cast<uint8_t>(visible_by_extremes(queries, keys));
      entries[m] = std::min(entries[m], entry);
    }
  }
}

// Hides the blocks of a row that no list of its queries has a key in.
TK_INLINE void hide_unlisted(const MaskParams& mask, int64_t M, int64_t N, int64_t b, int64_t h,
                             int64_t i0, uint8_t* entries) {
  constexpr uint8_t kListed = 0x80;
  const int64_t column_blocks = (N + kBlockMaskSize - 1) / kBlockMaskSize;
  const int64_t size = mask.selected_size;
  for (int64_t i = i0; i < std::min(M, i0 + kBlockMaskSize); ++i) {
    const SelectedList list = selected_list(mask, b, h, i);
    for (const int32_t* entry = list.begin; entry != list.end; ++entry) {
      const int64_t n = *entry, end = std::min((n + 1) * size, N);
      if (n < 0) continue;
      for (int64_t m = n * size / kBlockMaskSize; m * kBlockMaskSize < end; ++m) {
        entries[m] |= kListed;
      }
    }
  }
  for (int64_t m = 0; m < column_blocks; ++m) {
    const bool is_listed = entries[m] >= kListed;
    entries[m] = is_listed ? static_cast<uint8_t>(entries[m] - kListed) : 0;
  }
}

// B and H are the dimensions of the block mask: 1 where the mask does not depend on them.
void fill_block_mask(const MaskParams& mask, int64_t B, int64_t H, int64_t M, int64_t N,
                     const Workers& workers) {
  const int64_t row_blocks = (M + kBlockMaskSize - 1) / kBlockMaskSize;
  const int64_t column_blocks = (N + kBlockMaskSize - 1) / kBlockMaskSize;
  for_each(workers, B * H * row_blocks, [&](int64_t, int64_t item) {
    const int64_t b = item / (H * row_blocks), h = item / row_blocks % H, m = item % row_blocks;
    const DistinctRows rows = distinct_rows(mask, M, b, h, m * kBlockMaskSize);
    uint8_t* const entries = mask.block_mask + item * column_blocks;
    classify_by_extremes(mask, M, N, b, h, m * kBlockMaskSize, entries);
    if (mask.selected) hide_unlisted(mask, M, N, b, h, m * kBlockMaskSize, entries);
    const bool decides = !has_other_elements(mask) && !mask.selected;
    for (int64_t n = 0; n < column_blocks; ++n) {
      const auto entry = static_cast<Visible>(entries[n]);
      if (entry == Visible::kEmpty || (entry == Visible::kFull && decides)) continue;
      entries[n] = static_cast<uint8_t>(classify_block(mask, N, b, h, rows, n * kBlockMaskSize));
    }
  });
}

// Bit c: key j0 + c is visible to some query of head h under the element mask and the diagonals.
TK_INLINE uint64_t live_keys_of_block(const MaskParams& mask, int64_t M, int64_t N, int64_t b,
                                      int64_t h, int64_t j0) {
  const uint64_t all = bit_range(0, N - j0);
  const int64_t j1 = N - j0 < kBlockMaskSize ? N : j0 + kBlockMaskSize;
  const QueryInterval queries = block_queries(mask, j0, j1);
  const int64_t begin = queries.begin > 0 ? queries.begin / kBlockMaskSize * kBlockMaskSize : 0;
  const int64_t end = queries.end < M ? queries.end : M;
  const auto block_end = [&](int64_t i0) {
    return M - i0 < kBlockMaskSize ? M : i0 + kBlockMaskSize;
  };
  const auto visible = [&](int64_t i0) {
    return block_visible(mask, N, b, h, i0, block_end(i0), j0, j1);
  };
  for (int64_t i0 = begin; i0 < end; i0 += kBlockMaskSize) {
    if (visible(i0) == Visible::kFull) return all;
  }
  uint64_t live = 0;
  for (int64_t i0 = begin; i0 < end; i0 += kBlockMaskSize) {
    if (visible(i0) == Visible::kEmpty) continue;
    for (int64_t i = i0; i < block_end(i0); ++i) {
      live |= visible_bits(mask, N, b, h, i, j0);
      if (live == all) return all;
    }
  }
  return live;
}

// Fills `live_keys`; the strides of p are set. Key ranges are left out: they hide a key from every
// query or from none.
void fill_live_keys(const Problem& p, uint8_t* live_keys, const Workers& workers) {
  MaskParams mask = p.mask;
  mask.key_start = mask.key_end = nullptr;
  const bool by_head = p.live_keys_stride[1] != 0;
  const int64_t B = p.live_keys_stride[0] == 0 ? 1 : p.B, H = by_head ? p.H_kv : 1;
  const int64_t heads = by_head ? p.H_q / p.H_kv : 1;  // query heads that may differ
  const int64_t column_blocks = (p.N + kBlockMaskSize - 1) / kBlockMaskSize;
  for_each(workers, B * H * column_blocks, [&](int64_t, int64_t item) {
    const int64_t b = item / (H * column_blocks), h = item / column_blocks % H;
    const int64_t j0 = item % column_blocks * kBlockMaskSize;
    uint64_t live = 0;
    for (int64_t n = 0; n < heads; ++n) {
      live |= live_keys_of_block(mask, p.M, p.N, b, h * heads + n, j0);
    }
    uint8_t* const to = live_keys + (b * H + h) * p.N + j0;
    for (int64_t c = 0; c < kBlockMaskSize && j0 + c < p.N; ++c) to[c] = live >> c & 1;
  });
}

}  // namespace tk::cpu::TK_ISA
