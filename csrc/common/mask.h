// Mask visibility per block, per row and per element. Shared by the forward and backward kernels,
// on CPU and CUDA.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/params.h"

namespace tk {

// Queries and keys per entry of the block mask; equals BLOCK_MASK_SIZE in masks/resolved.py.
constexpr int64_t kBlockMaskSize = 64;  // one bit per key fits in a 64-bit word

// Diagonal offset beyond every index, UNBOUNDED of masks/constraints.py. Its sums with indices fit
// in 64 bits.
constexpr int64_t kUnbounded = int64_t{1} << 62;

// Block size of `blocks`, at most the extent of the mask, so that its multiples fit in 64 bits.
TK_INLINE int64_t bounded_block_size(const Problem& p, int64_t size) {
  const int64_t extent = p.M > p.N ? p.M : p.N;
  return size <= extent ? size : extent > 0 ? extent : 1;
}

enum class Visible : uint8_t { kEmpty, kPartial, kFull };

// Keys begin <= j < end.
struct KeyInterval {
  int64_t begin;
  int64_t end;
};

// Queries begin <= i < end.
struct QueryInterval {
  int64_t begin;
  int64_t end;
};

// Keys visible to query i under the diagonals, the key range and N. If there are none, the ends may
// be any integers.
TK_INLINE KeyInterval row_interval(const MaskParams& mask, int64_t N, int64_t b, int64_t i) {
  int64_t begin = i + mask.diagonal_low, end = i + mask.diagonal_high + 1;
  if (mask.key_start && mask.key_start[b] > begin) begin = mask.key_start[b];
  if (mask.key_end && mask.key_end[b] < end) end = mask.key_end[b];
  return {begin < 0 ? 0 : begin, end > N ? N : end};
}

TK_INLINE Visible block_mask_entry(const MaskParams& mask, int64_t b, int64_t h, int64_t i0,
                                   int64_t j0) {
  if (!mask.block_mask) return Visible::kFull;
  const int64_t row = b * mask.block_mask_stride[0] + h * mask.block_mask_stride[1] +
                      i0 / kBlockMaskSize * mask.block_mask_stride[2];
  return static_cast<Visible>(mask.block_mask[row + j0 / kBlockMaskSize]);
}

// Visibility of the block of queries i0 <= i < i1 and keys j0 <= j < j1. The block has at most
// kBlockMaskSize rows and columns and does not cross a block mask boundary.
TK_INLINE Visible block_visible(const MaskParams& mask, int64_t N, int64_t b, int64_t h, int64_t i0,
                                int64_t i1, int64_t j0, int64_t j1) {
  const Visible entry = block_mask_entry(mask, b, h, i0, j0);
  if (entry == Visible::kEmpty) return entry;
  const KeyInterval first = row_interval(mask, N, b, i0), last = row_interval(mask, N, b, i1 - 1);
  if (last.end <= j0 || first.begin >= j1) return Visible::kEmpty;
  const bool all = last.begin <= j0 && first.end >= j1;
  return all ? entry : Visible::kPartial;
}

// Keys visible to any query of i0 <= i < i1 under the diagonals, the key range and N. Both ends of
// a row's interval increase with i, so the first and the last row determine it.
TK_INLINE KeyInterval block_interval(const MaskParams& mask, int64_t N, int64_t b, int64_t i0,
                                     int64_t i1) {
  return {row_interval(mask, N, b, i0).begin, row_interval(mask, N, b, i1 - 1).end};
}

// Queries to which a key of j0 <= j < j1 is visible under the diagonals. Both ends may lie outside
// 0 .. M.
TK_INLINE QueryInterval block_queries(const MaskParams& mask, int64_t j0, int64_t j1) {
  return {j0 - mask.diagonal_high, j1 - mask.diagonal_low};
}

// Number of live keys, (B or 1, H_kv or 1, N): they depend on what the block mask depends on.
TK_INLINE int64_t live_keys_size(const Problem& p) {
  const int64_t* stride = p.mask.block_mask_stride;
  return (stride[0] == 0 ? 1 : p.B) * (stride[1] == 0 ? 1 : p.H_kv) * p.N;
}

TK_INLINE void set_live_keys(Problem& p, const uint8_t* live_keys) {
  const int64_t* stride = p.mask.block_mask_stride;
  p.live_keys = live_keys;
  p.live_keys_stride[0] = stride[0] == 0 ? 0 : (stride[1] == 0 ? 1 : p.H_kv) * p.N;
  p.live_keys_stride[1] = stride[1] == 0 ? 0 : p.N;
}

// Live keys of key head h, (N); null if all are live.
TK_INLINE const uint8_t* live_keys_of(const Problem& p, int64_t b, int64_t h) {
  if (!p.live_keys) return nullptr;
  return p.live_keys + b * p.live_keys_stride[0] + h * p.live_keys_stride[1];
}

// True if constraints other than position tests hide single elements.
TK_INLINE bool has_other_elements(const MaskParams& mask) { return mask.dense || mask.blocks; }

TK_INLINE bool has_element_mask(const MaskParams& mask) {
  return mask.q_low || has_other_elements(mask);
}

// Packs `columns` (at most 64) bytes into bits: bit c is bytes[c] != 0. A true byte of a bool
// tensor may have any value but 0, as in `uint8_tensor.view(torch.bool)`.
TK_INLINE uint64_t pack_bits(const uint8_t* bytes, int64_t columns) {
  constexpr uint64_t kLow7 = 0x7f7f7f7f7f7f7f7fu;
  uint64_t bits = 0;
  int64_t c = 0;
  for (; c + 8 <= columns; c += 8) {
    uint64_t eight;
    __builtin_memcpy(&eight, bytes + c, 8);
    // 1 for each byte that is not 0: the sum carries into its top bit.
    const uint64_t set = (((eight & kLow7) + kLow7) | eight) >> 7 & 0x0101010101010101u;
    // The lowest bit of byte n moves to bit 56 + n; no two partial products overlap.
    bits |= (set * 0x0102040810204080u) >> 56 << c;
  }
  for (; c < columns; ++c) bits |= static_cast<uint64_t>(bytes[c] != 0) << c;
  return bits;
}

// Mask of bits first .. last - 1, clipped to 64 bits; 0 if last <= first.
TK_INLINE uint64_t bit_range(int64_t first, int64_t last) {
  first = first < 0 ? 0 : first;
  last = last > 64 ? 64 : last;
  return last <= first ? 0 : ~uint64_t{0} >> (64 - last + first) << first;
}

TK_INLINE uint64_t dense_bits(const MaskParams& mask, int64_t b, int64_t h, int64_t i, int64_t j0,
                              int64_t columns) {
  const int64_t* stride = mask.dense_stride;
  const uint8_t* row = mask.dense + b * stride[0] + h * stride[1] + i * stride[2] + j0 * stride[3];
  if (stride[3] == 1) return pack_bits(row, columns);
  uint8_t bytes[kBlockMaskSize];
  for (int64_t c = 0; c < columns; ++c) bytes[c] = row[c * stride[3]];
  return pack_bits(bytes, columns);
}

// First element of position test n: element i of q_low and q_high, element j of k_position.
TK_INLINE int64_t position_offset(const int64_t (&stride)[3], int64_t n, int64_t b, int64_t h) {
  return n * stride[0] + b * stride[1] + h * stride[2];
}

// True if low <= position <= high on the circle of 64-bit integers: with low > high, from low up
// and from high down.
TK_INLINE bool is_between(int64_t low, int64_t position, int64_t high) {
  const auto start = static_cast<uint64_t>(low);
  return static_cast<uint64_t>(position) - start <= static_cast<uint64_t>(high) - start;
}

TK_INLINE uint64_t position_bits(const MaskParams& mask, int64_t b, int64_t h, int64_t i,
                                 int64_t j0, int64_t columns) {
  uint64_t bits = ~uint64_t{0};
  for (int64_t n = 0; n < mask.tests; ++n) {
    const int64_t row = position_offset(mask.q_position_stride, n, b, h) + i;
    const int64_t low = mask.q_low[row], high = mask.q_high[row];
    const int64_t* k = mask.k_position + position_offset(mask.k_position_stride, n, b, h) + j0;
    uint8_t bytes[kBlockMaskSize];
    for (int64_t c = 0; c < columns; ++c) bytes[c] = is_between(low, k[c], high);
    bits &= pack_bits(bytes, columns);
  }
  return bits;
}

TK_INLINE uint64_t block_bits(const MaskParams& mask, int64_t h, int64_t i, int64_t j0,
                              int64_t columns) {
  const int64_t* stride = mask.blocks_stride;
  const uint8_t* row = mask.blocks + h * stride[0] + i / mask.block_size * stride[1];
  uint64_t bits = 0;
  for (int64_t n = j0 / mask.block_size; n * mask.block_size < j0 + columns; ++n) {
    const int64_t first = n * mask.block_size - j0;
    if (row[n * stride[2]]) bits |= bit_range(first, first + mask.block_size);
  }
  return bits;
}

// Bit c: key j0 + c is visible to query i under the element mask (position tests, dense, blocks).
TK_INLINE uint64_t element_mask_bits(const MaskParams& mask, int64_t N, int64_t b, int64_t h,
                                     int64_t i, int64_t j0) {
  const int64_t columns = N - j0 < kBlockMaskSize ? N - j0 : kBlockMaskSize;
  uint64_t bits = bit_range(0, columns);
  if (mask.q_low) bits &= position_bits(mask, b, h, i, j0, columns);
  if (mask.dense) bits &= dense_bits(mask, b, h, i, j0, columns);
  if (mask.blocks) bits &= block_bits(mask, h, i, j0, columns);
  return bits;
}

// True if the element mask of query i > 0 is known to equal that of query i - 1.
TK_INLINE bool equals_previous_row(const MaskParams& mask, int64_t b, int64_t h, int64_t i) {
  if (mask.dense || (mask.blocks && i % mask.block_size == 0)) return false;
  bool equal = true;
  for (int64_t n = 0; n < mask.tests; ++n) {
    const int64_t row = position_offset(mask.q_position_stride, n, b, h) + i;
    equal &= mask.q_low[row] == mask.q_low[row - 1] && mask.q_high[row] == mask.q_high[row - 1];
  }
  return equal;
}

// Least and greatest of some integers.
struct Extremes {
  int64_t least = INT64_MAX, greatest = INT64_MIN;
};

TK_INLINE void include(Extremes& x, const Extremes& other) {
  x.least = other.least < x.least ? other.least : x.least;
  x.greatest = other.greatest > x.greatest ? other.greatest : x.greatest;
}

// Extremes of the intervals of some queries in one position test.
struct Intervals {
  Extremes low, high;
  bool some_wrap = false, all_wrap = true;  // low > high
};

TK_INLINE void include(Intervals& x, int64_t low, int64_t high) {
  include(x.low, Extremes{low, low});
  include(x.high, Extremes{high, high});
  x.some_wrap |= low > high;
  x.all_wrap &= low > high;
}

// Visibility of keys at these positions to queries with these intervals; kPartial if undecided.
TK_INLINE Visible visible_by_extremes(const Intervals& queries, const Extremes& keys) {
  const Extremes &low = queries.low, &high = queries.high;
  bool is_full = low.greatest <= keys.least && keys.greatest <= high.least;
  if (queries.all_wrap) {
    is_full = low.greatest <= keys.least || keys.greatest <= high.least;
  } else if (queries.some_wrap) {
    return Visible::kPartial;
  } else if (keys.greatest < low.least || high.greatest < keys.least) {
    return Visible::kEmpty;
  }
  return is_full ? Visible::kFull : Visible::kPartial;
}

// True if key j is visible to query i under the element mask.
TK_INLINE bool element_visible(const MaskParams& mask, int64_t b, int64_t h, int64_t i, int64_t j) {
  for (int64_t n = 0; n < mask.tests; ++n) {
    const int64_t row = position_offset(mask.q_position_stride, n, b, h) + i;
    const int64_t column = position_offset(mask.k_position_stride, n, b, h) + j;
    if (!is_between(mask.q_low[row], mask.k_position[column], mask.q_high[row])) return false;
  }
  if (mask.dense) {
    const int64_t* stride = mask.dense_stride;
    if (!mask.dense[b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3]]) return false;
  }
  if (!mask.blocks) return true;
  const int64_t* stride = mask.blocks_stride;
  return mask
      .blocks[h * stride[0] + i / mask.block_size * stride[1] + j / mask.block_size * stride[2]];
}

// Bit c: key j0 + c is visible to query i. j0 is a multiple of kBlockMaskSize.
TK_INLINE uint64_t visible_keys(const MaskParams& mask, int64_t N, int64_t b, int64_t h, int64_t i,
                                int64_t j0) {
  const KeyInterval keys = row_interval(mask, N, b, i);
  const uint64_t bits = keys.end > j0 ? bit_range(keys.begin - j0, keys.end - j0) : 0;
  return bits && has_element_mask(mask) ? bits & element_mask_bits(mask, N, b, h, i, j0) : bits;
}

}  // namespace tk
