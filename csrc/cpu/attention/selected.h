// Lists of selected keys: the part of the element mask that only the CPU kernels have.
#pragma once

#include <algorithm>

#include "common/mask.h"

namespace tk::cpu::TK_ISA {

// A list of query i, which ascends.
struct SelectedList {
  const int32_t *begin, *end;
};

TK_INLINE SelectedList selected_list(const MaskParams& mask, int64_t b, int64_t h, int64_t i) {
  const int32_t* const list = mask.selected + b * mask.selected_stride[0] +
                              h * mask.selected_stride[1] + i * mask.selected_count;
  return {list, list + mask.selected_count};
}

// First entry that is at least `block`. Without branches: which half has it is unpredictable.
TK_INLINE const int32_t* first_entry(const SelectedList& list, int64_t block) {
  const int32_t* from = list.begin;
  for (int64_t count = list.end - list.begin; count > 0;) {
    const int64_t half = (count + 1) / 2;
    from += from[half - 1] < block ? half : 0;
    count -= half;
  }
  return from;
}

// Places in the lists of a block's queries, by query % kBlockMaskSize: where blocks of ascending j0
// find their first entry without a search. -1: not yet known.
struct Cursors {
  int32_t place[kBlockMaskSize];
  Cursors() { std::fill_n(place, kBlockMaskSize, -1); }
};

// Bit c: key j0 + c is in the list of query i.
TK_INLINE uint64_t selected_bits(const MaskParams& mask, int64_t b, int64_t h, int64_t i,
                                 int64_t j0, Cursors* cursors) {
  const int64_t size = mask.selected_size, end = j0 + kBlockMaskSize;
  const SelectedList list = selected_list(mask, b, h, i);
  int32_t unknown = -1;
  int32_t& place = cursors ? cursors->place[i % kBlockMaskSize] : unknown;
  const int32_t* n = place < 0 ? first_entry(list, j0 / size) : list.begin + place;
  while (n != list.end && *n * size + size <= j0) ++n;
  place = static_cast<int32_t>(n - list.begin);
  uint64_t bits = 0;
  for (; n != list.end && *n * size < end; ++n) {
    bits |= bit_range(*n * size - j0, *n * size + size - j0);
  }
  return bits;
}

// Bit c: key j0 + c is visible to query i under the element mask.
TK_INLINE uint64_t element_bits(const MaskParams& mask, int64_t N, int64_t b, int64_t h, int64_t i,
                                int64_t j0) {
  const uint64_t bits = element_mask_bits(mask, N, b, h, i, j0);
  return bits && mask.selected ? bits & selected_bits(mask, b, h, i, j0, nullptr) : bits;
}

// Bit c: key j0 + c is visible to query i. j0 is a multiple of kBlockMaskSize.
TK_INLINE uint64_t visible_bits(const MaskParams& mask, int64_t N, int64_t b, int64_t h, int64_t i,
                                int64_t j0, Cursors* cursors = nullptr) {
  const uint64_t bits = visible_keys(mask, N, b, h, i, j0);
  return bits && mask.selected ? bits & selected_bits(mask, b, h, i, j0, cursors) : bits;
}

}  // namespace tk::cpu::TK_ISA
