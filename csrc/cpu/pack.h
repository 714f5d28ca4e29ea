// Copies of q, k, v, do in the dtype that is computed in, widths and lengths padded with zeros to
// whole vectors and blocks: the loops that read them have no edges. Rows that nothing may see
// become zero, so that NaN in them meets no product.
#pragma once

#include "convert.h"
#include "vec.h"

namespace tk::cpu::TK_ISA {

constexpr int64_t kBlock = 64;  // queries and keys a side of a tile: its scores stay in L1

TK_INLINE int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

template <typename Real>
TK_INLINE int64_t padded_width(int64_t width) {
  return round_up(width, kLanes<Real>);
}

// One (b, h) slice of a tensor: rows (length, width), padded to blocks.
struct Slice {
  DType dtype;
  Strided tensor;
  int64_t b, h, length, width;
};

// rows[r] for the block's kBlock rows from row0 on; row r is zero where !keep(row0 + r).
template <typename Real, typename Keep>
TK_INLINE void pack_rows(const Slice& from, int64_t row0, Keep&& keep, Real* rows) {
  const int64_t padded = padded_width<Real>(from.width);
  for (int64_t r = 0; r < kBlock; ++r, rows += padded) {
    const bool read = row0 + r < from.length && keep(row0 + r);
    const int64_t count = read ? from.width : 0;
    if (read) {
      read_row(from.dtype, from.tensor.data, row_offset(from.tensor, from.b, from.h, row0 + r),
               from.tensor.stride[3], count, rows);
    }
    for (int64_t c = count; c < padded; ++c) rows[c] = 0;
  }
}

// The same block transposed: columns[c * kBlock + r] = rows[r * padded + c].
template <typename Real>
TK_INLINE void transpose_block(const Real* rows, int64_t padded, Real* columns) {
  for (int64_t r = 0; r < kBlock; ++r) {
    for (int64_t c = 0; c < padded; ++c) columns[c * kBlock + r] = rows[r * padded + c];
  }
}

}  // namespace tk::cpu::TK_ISA
