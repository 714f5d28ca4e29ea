// Packing of blocks of q, k, v, o and do: rows in the compute dtype, padded with zeros in both
// dimensions, so that the loops that read them have no edge cases. Dead rows become zero: they may
// hold NaN, which must not enter a product.
#pragma once

#include <algorithm>

#include "cpu/engine/convert.h"
#include "cpu/engine/operand.h"
#include "cpu/engine/prefetch.h"
#include "cpu/engine/vec.h"

namespace tk::cpu::TK_ISA {

constexpr int64_t kBlock = 64;  // keys per block; queries too, unless the engine sets kQueries

// Rows (length, width) of one (b, h) of a tensor. For paged caches see Problem::pages.
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

  // Number of rows, at most `count`, from `row` on that are stride[2] apart.
  TK_INLINE_METHOD int64_t contiguous_rows(int64_t row, int64_t count) const {
    return pages ? std::min(count, page_size - row % page_size) : count;
  }
};

// Head h of k or v, with rows of `width` elements.
TK_INLINE Slice keys_of(const Problem& p, const Strided& x, int64_t b, int64_t h, int64_t width) {
  return {p.dtype, x, b, h, p.N, width, p.pages, p.page_size};
}

// Elements from row `row` to row `row` + `ahead`; 0 for pages that do not have it.
TK_INLINE int64_t distance_ahead(const Slice& from, int64_t row, int64_t ahead) {
  if (!from.pages) return ahead * from.tensor.stride[2];
  return row + ahead < from.length ? from.offset(row + ahead) - from.offset(row) : 0;
}

// Reads the elements of a row at `offset`. bfloat16 stays bfloat16 if Stored is.
template <typename Stored>
TK_INLINE void unpack_row(const Slice& from, int64_t offset, Stored* row) {
  const int64_t stride = from.tensor.stride[3];
  if constexpr (std::is_same_v<Stored, BFloat16>) {
    const Stored* const data = static_cast<const Stored*>(from.tensor.data) + offset;
    if (stride == 1) {
      __builtin_memcpy(row, data, static_cast<size_t>(from.width) * sizeof(Stored));
    } else {
      for (int64_t c = 0; c < from.width; ++c) row[c] = data[c * stride];
    }
  } else {
    read_row(from.dtype, from.tensor.data, offset, stride, from.width, row);
  }
}

// Reads `count` rows from row0 on, `padded` elements each, and prefetches the `count` rows after
// them. Rows with !keep(row0 + r) become zero.
template <typename Stored, typename Keep>
TK_INLINE void unpack_rows(const Slice& from, int64_t row0, int64_t count, int64_t padded,
                           Keep&& keep, Stored* rows) {
  const int64_t size = size_of(from.dtype), end = std::min(row0 + count, from.length);
  for (int64_t row = row0, run; row < end; row += run) {
    run = from.contiguous_rows(row, end - row);
    const int64_t offset = from.offset(row), ahead = distance_ahead(from, row, count);
    for (int64_t r = 0; r < run; ++r, rows += padded) {
      const bool read = keep(row + r);
      if (read) {
        const int64_t at = offset + r * from.tensor.stride[2];
        if (from.tensor.stride[3] == 1) {
          prefetch(from.tensor.data, (at + ahead) * size, from.width * size);
        }
        unpack_row(from, at, rows);
      }
      for (int64_t c = read ? from.width : 0; c < padded; ++c) rows[c] = Stored{};
    }
  }
  std::fill(rows, rows + std::max<int64_t>(row0 + count - std::max(row0, end), 0) * padded,
            Stored{});
}

// True if x holds neither NaN nor a value that rounds to infinity in bfloat16.
TK_INLINE bool all_finite(const float* x, int64_t count) {
  constexpr uint32_t kTooLarge = 0x7f7f8000u;
  uint32_t largest = 0;
  for (int64_t c = 0; c < count; ++c) {
    const uint32_t magnitude = bit_cast<uint32_t>(x[c]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest < kTooLarge;
}

// Packs one panel. Clears `finite` if the engine would have to split an infinity or NaN into parts
// (see kernels.cpp). `scratch` holds the panel's rows if they cannot be read in place.
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
                        from.dtype == kDTypeOf<Stored> && from.page_size % kRunRows == 0;
  PanelRows<Stored> rows;
  if (in_place) {
    rows = {static_cast<const Stored*>(from.tensor.data), from.tensor.stride[2], true};
    for (int64_t r = 0; r < layout.rows; r += kRunRows) {
      rows.offset[r / kRunRows] = from.offset(row0 + r);
      rows.next[r / kRunRows] = distance_ahead(from, row0 + r, layout.rows);
    }
  } else {
    Stored* to = Engine::unpack_to(layout, panel, static_cast<Stored*>(scratch));
    unpack_rows(from, row0, layout.rows, layout.width, keep, to);
    rows = {to, layout.width};
  }
  if constexpr (Engine::kSplits) {
    for (int64_t r = 0; r < layout.rows; ++r) {
      if (all_finite(rows.row(r), layout.width)) continue;
      __atomic_store_n(finite, false, __ATOMIC_RELAXED);
    }
  }
  Engine::pack(layout, rows, panel);
}

}  // namespace tk::cpu::TK_ISA
