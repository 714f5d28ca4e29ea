// Blocks of q, k, v, o, do as rows in the dtype that is computed in, widths and lengths padded with
// zeros: the loops that read them have no edges. Rows that nothing may see become zero, so that NaN
// in them meets no product.
#pragma once

#include <algorithm>

#include "cpu/engine/convert.h"
#include "cpu/engine/operand.h"
#include "cpu/engine/prefetch.h"
#include "cpu/engine/vec.h"

namespace tk::cpu::TK_ISA {

constexpr int64_t kBlock = 64;  // keys a block, and queries where their number is not the engine's

// One (b, h) slice of a tensor: rows (length, width). Of a cache in pages, see Problem::pages.
struct Slice {
  DType dtype;
  Strided tensor;
  int64_t b, h, length, width;
  const int32_t* pages = nullptr;
  int64_t page_size = 0;

  TK_INLINE_METHOD int64_t offset(int64_t row) const {
    if (!pages) return row_offset(tensor, b, h, row);
    return row_offset(tensor, pages[row / page_size], h, row % page_size);
  }

  // How many of `count` rows from `row` on lie stride[2] apart.
  TK_INLINE_METHOD int64_t together(int64_t row, int64_t count) const {
    return pages ? std::min(count, page_size - row % page_size) : count;
  }
};

// Head h of k or v, its rows `width` elements.
TK_INLINE Slice keys_of(const Problem& p, const Strided& x, int64_t b, int64_t h, int64_t width) {
  return {p.dtype, x, b, h, p.N, width, p.pages, p.page_size};
}

// Asks for the row `ahead` rows behind row `row`.
TK_INLINE void fetch_row(const Slice& from, int64_t row, int64_t ahead) {
  if (from.pages || from.tensor.stride[3] != 1) return;
  const int64_t size = size_of(from.dtype);
  const int64_t offset = from.offset(row) + ahead * from.tensor.stride[2];
  prefetch(from.tensor.data, offset * size, from.width * size);
}

// rows[r] for `count` rows from row0 on, `padded` elements each; row r is zero where
// !keep(row0 + r). BFloat16 stays what it is.
template <typename Stored, typename Keep>
TK_INLINE void unpack_rows(const Slice& from, int64_t row0, int64_t count, int64_t padded,
                           Keep&& keep, Stored* rows) {
  for (int64_t r = 0; r < count; ++r, rows += padded) {
    const bool read = row0 + r < from.length && keep(row0 + r);
    const int64_t known = read ? from.width : 0, stride = from.tensor.stride[3];
    if (read) {
      fetch_row(from, row0 + r, count);
      const int64_t offset = from.offset(row0 + r);
      if constexpr (std::is_same_v<Stored, BFloat16>) {
        const Stored* row = static_cast<const Stored*>(from.tensor.data) + offset;
        if (stride == 1) {
          __builtin_memcpy(rows, row, static_cast<size_t>(known) * sizeof(Stored));
        } else {
          for (int64_t c = 0; c < known; ++c) rows[c] = row[c * stride];
        }
      } else {
        read_row(from.dtype, from.tensor.data, offset, stride, known, rows);
      }
    }
    for (int64_t c = known; c < padded; ++c) rows[c] = Stored{};
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
// whose products with zeros are NaN: see kernels.cpp. `scratch` holds the panel's rows, if need be.
template <typename Engine, typename Keep>
void pack_panel(const PanelLayout& layout, const Slice& from, int64_t row0, Keep&& keep,
                void* scratch, char* panel, bool* finite) {
  using Stored = typename Engine::Stored;
  int64_t kept = 0;
  for (int64_t r = row0; r < row0 + layout.rows && r < from.length; ++r) kept += keep(r);
  if (kept == 0) {
    __builtin_memset(panel, 0, layout.bytes);
    return;
  }
  const bool in_place = Engine::kReadsInPlace && kept == layout.rows &&
                        from.width == layout.width && from.tensor.stride[3] == 1 &&
                        from.dtype == kDTypeOf<Stored> &&
                        from.together(row0, layout.rows) == layout.rows;
  const Stored* rows;
  int64_t stride = layout.width;
  if (in_place) {
    rows = static_cast<const Stored*>(from.tensor.data) + from.offset(row0);
    stride = from.tensor.stride[2];
  } else {
    Stored* to = Engine::unpack_to(layout, panel, static_cast<Stored*>(scratch));
    unpack_rows(from, row0, layout.rows, layout.width, keep, to);
    rows = to;
  }
  if constexpr (Engine::kSplits) {
    for (int64_t r = 0; r < layout.rows; ++r) {
      if (all_finite(rows + r * stride, layout.width)) continue;
      __atomic_store_n(finite, false, __ATOMIC_RELAXED);
    }
  }
  Engine::pack(layout, rows, stride, panel);
}

}  // namespace tk::cpu::TK_ISA
