// Swizzled tiles in shared memory, and asynchronous copies into them.
//
// Rows are divided into panels of 128 bytes, or 64 if 128 does not divide the row. The index of a
// 16-byte chunk within a panel row is XORed with the row. The eight rows that one ldmatrix reads at
// the same column are then in different groups of four banks, without bank conflicts.
#pragma once

#include "common/mask.h"
#include "cuda/common/rows.cuh"

namespace tk::cuda {

template <typename Element, int kRows_, int kWidth_>
struct SharedTile {
  static constexpr int kRows = kRows_, kWidth = kWidth_;
  static constexpr int kPerChunk = 16 / sizeof(Element);
  static constexpr int kPanelBytes = kWidth * sizeof(Element) % 128 == 0 ? 128 : 64;
  static constexpr int kPanel = kPanelBytes / sizeof(Element);
  static constexpr int kBytes = kRows * kWidth * sizeof(Element);
  static_assert(kWidth % kPanel == 0);

  // True if moved() reaches all of kColumns columns from the first one, a multiple of kColumns.
  template <int kColumns>
  static constexpr bool kMovesAcross = kColumns % kPanel == 0 || kPanel % kColumns == 0;

  Element* data;

  TK_DEVICE_METHOD int offset(int row, int column) const {
    const int within = column % kPanel;
    const int exchange = kPanelBytes == 128 ? row & 7 : row >> 1 & 3;
    const int chunk = within / kPerChunk ^ exchange;
    return (column / kPanel * kRows + row) * kPanel + chunk * kPerChunk + within % kPerChunk;
  }

  TK_DEVICE_METHOD Element* at(int row, int column) const { return data + offset(row, column); }

  // Address of (row + rows, column + columns), given offset(row, column). `rows` is a constant
  // multiple of 8 and `columns` of kPerChunk; adding `columns` must not carry beyond the bits of
  // the column within its panel.
  TK_DEVICE_METHOD Element* moved(int offset, int rows, int columns) const {
    return data + ((offset ^ columns % kPanel) + (columns / kPanel * kRows + rows) * kPanel);
  }
};

// Starts an asynchronous copy of rows first, first + 1, ... of a head into the tile. Columns beyond
// the width are filled with zeros, and, unless `all` is set, rows for which is_live(row) is false.
// Those rows are not read and may hold NaN. The copy is complete after wait_copies<0>() and a
// barrier.
template <int kThreads, typename Element, int kRows, int kWidth, typename IsLive>
TK_DEVICE void start_load(const SharedTile<Element, kRows, kWidth>& tile,
                          const Rows<const Element>& rows, int first, bool all,
                          const IsLive& is_live) {
  constexpr int kPerChunk = 16 / sizeof(Element), kChunks = kWidth / kPerChunk;
  constexpr bool kSameColumn = kThreads % kChunks == 0 && kRows * kChunks % kThreads == 0;
  const int thread = opaque(static_cast<int>(threadIdx.x));
  if (!rows.in_chunks) {
#pragma unroll 1
    for (int n = thread; n < kRows * kWidth; n += kThreads) {
      const int row = n / kWidth, column = n % kWidth;
      const bool copied = column < rows.width && (all || is_live(first + row));
      *tile.at(row, column) = copied ? rows.at(first + row)[column] : Element{};
    }
  } else if (kSameColumn && all) {
    constexpr int kStep = kSameColumn ? kThreads / kChunks : kRows;
    const int column = thread % kChunks * kPerChunk, row = thread / kChunks;
    const bool copied = column < rows.width;
    const Element* from = copied ? rows.at(first + row) + column : rows.data;
#pragma unroll
    for (int r = 0; r < kRows; r += kStep) {
      copy_async_16(tile.at(row + r, column), from, copied);
      from += kStep * rows.stride;
    }
  } else {
#pragma unroll 1
    for (int n = thread; n < kRows * kChunks; n += kThreads) {
      const int row = n / kChunks, column = n % kChunks * kPerChunk;
      const bool copied = column < rows.width && (all || is_live(first + row));
      const Element* const from = rows.at(first + row) + column;
      copy_async_16(tile.at(row, column), copied ? from : rows.data, copied);
    }
  }
  commit_copies();
}

// True for keys visible to at least one query of the key head.
struct LiveKeys {
  int begin, end;
  const uint8_t* by_element;  // see live_keys_of in common/mask.h

  TK_DEVICE_METHOD bool operator()(int j) const {
    return j >= begin && j < end && (!by_element || by_element[j]);
  }
};

template <typename Params>
TK_DEVICE LiveKeys live_keys_of(const Arguments<Params>& a, const Sequence& s, int h_kv) {
  const Problem& p = a.params;
  return {max(s.begin, s.low), min(s.end, s.M + s.high), tk::live_keys_of(p, s.b, h_kv)};
}

}  // namespace tk::cuda
