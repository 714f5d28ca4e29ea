// A tile in shared memory, and how it gets there.
//
// Rows are cut into panels of 128 bytes (64 where that does not divide them), and the 16-byte
// chunks of a panel's row are exchanged by an exclusive or with the row: eight rows at the same
// column, which one matrix load takes, then lie in eight different quarters of the 32 banks.
#pragma once

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

  Element* data;

  TK_DEVICE_METHOD int offset(int row, int column) const {
    const int within = column % kPanel;
    const int exchange = kPanelBytes == 128 ? row & 7 : row >> 1 & 3;
    const int chunk = within / kPerChunk ^ exchange;
    return (column / kPanel * kRows + row) * kPanel + chunk * kPerChunk + within % kPerChunk;
  }

  TK_DEVICE_METHOD Element* at(int row, int column) const { return data + offset(row, column); }

  // (row + rows, column + columns) from offset(row, column), for constants `rows`, a multiple of 8,
  // and `columns`, of 16, which row and column's place in its panel do not carry into.
  TK_DEVICE_METHOD Element* moved(int offset, int rows, int columns) const {
    return data + ((offset ^ columns % kPanel) + (columns / kPanel * kRows + rows) * kPanel);
  }
};

// Starts to copy rows first, first + 1, ... of a head; zeros beyond its width and, unless `all`
// are, for rows that are not `there`: they are not read, and may be NaN. Done after
// `wait_copies<0>` and a barrier.
template <int kThreads, typename Element, int kRows, int kWidth, typename There>
TK_DEVICE void start_load(const SharedTile<Element, kRows, kWidth>& tile,
                          const Rows<const Element>& rows, int first, bool all,
                          const There& there) {
  constexpr int kPerChunk = 16 / sizeof(Element), kChunks = kWidth / kPerChunk;
  constexpr bool kSameColumn = kThreads % kChunks == 0 && kRows * kChunks % kThreads == 0;
  const int thread = opaque(static_cast<int>(threadIdx.x));
  if (!rows.in_chunks) {
#pragma unroll 1
    for (int n = thread; n < kRows * kWidth; n += kThreads) {
      const int row = n / kWidth, column = n % kWidth;
      const bool copied = column < rows.width && (all || there(first + row));
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
      const bool copied = column < rows.width && (all || there(first + row));
      const Element* const from = rows.at(first + row) + column;
      copy_async_16(tile.at(row, column), copied ? from : rows.data, copied);
    }
  }
  commit_copies();
}

// Keys that diagonals, the range and segments show to some query.
struct LiveKeys {
  int begin, end;
  const uint8_t* used;  // null = all

  TK_DEVICE_METHOD bool operator()(int j) const {
    return j >= begin && j < end && (!used || used[j]);
  }
};

template <typename Params>
TK_DEVICE LiveKeys live_keys_of(const Arguments<Params>& a, const Sequence& s) {
  const Problem& p = a.params;
  return {max(s.begin, s.low), min(s.end, s.M + s.high),
          p.live_keys ? p.live_keys + s.b * p.N : nullptr};
}

}  // namespace tk::cuda
