// Blocks of q, k, v, o, do as rows in the dtype that is computed in, widths and lengths padded with
// zeros: the loops that read them have no edges. Rows that nothing may see become zero, so that NaN
// in them meets no product.
#pragma once

#include "convert.h"
#include "operand.h"
#include "vec.h"

namespace tk::cpu::TK_ISA {

constexpr int64_t kBlock = 64;  // keys a block, and queries where their number is not the engine's

// One (b, h) slice of a tensor: rows (length, width).
struct Slice {
  DType dtype;
  Strided tensor;
  int64_t b, h, length, width;
};

// rows[r] for `count` rows from row0 on, `padded` elements each; row r is zero where
// !keep(row0 + r).
template <typename Real, typename Keep>
TK_INLINE void unpack_rows(const Slice& from, int64_t row0, int64_t count, int64_t padded,
                           Keep&& keep, Real* rows) {
  for (int64_t r = 0; r < count; ++r, rows += padded) {
    const bool read = row0 + r < from.length && keep(row0 + r);
    const int64_t known = read ? from.width : 0;
    if (read) {
      read_row(from.dtype, from.tensor.data, row_offset(from.tensor, from.b, from.h, row0 + r),
               from.tensor.stride[3], known, rows);
    }
    for (int64_t c = known; c < padded; ++c) rows[c] = 0;
  }
}

// Neither NaN nor anything that rounds to infinity in bfloat16.
TK_INLINE bool all_finite(const float* x, int64_t count) {
  constexpr uint32_t kTooLarge = 0x7f7f8000u;
  uint32_t largest = 0;
  for (int64_t c = 0; c < count; ++c) {
    const uint32_t magnitude = bit_cast<uint32_t>(x[c]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest < kTooLarge;
}

// Fills one panel. `finite` becomes false where the engine would split an infinity into parts,
// whose products with zeros are NaN: see kernels.cpp.
template <typename Engine, typename Keep>
void pack_panel(const PanelLayout& layout, const Slice& from, int64_t row0, Keep&& keep,
                typename Engine::Real* scratch, char* panel, bool* finite) {
  using Real = typename Engine::Real;
  Real* rows = Engine::unpack_to(layout, panel, scratch);
  unpack_rows(from, row0, layout.rows, layout.width, keep, rows);
  if constexpr (Engine::kSplits) {
    if (!all_finite(rows, layout.rows * layout.width)) {
      __atomic_store_n(finite, false, __ATOMIC_RELAXED);
    }
  }
  Engine::pack(layout, rows, panel);
}

}  // namespace tk::cpu::TK_ISA
