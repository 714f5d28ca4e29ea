// Loads of rows into shared memory, through a function of each element.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/linear/segments.cuh"

namespace tk::cuda {

// The rows of one head, from column `first` on. `first` is a multiple of 16 elements.
template <typename Element>
TK_DEVICE Rows<Element> from_column(const Rows<Element>& rows, int first) {
  return {rows.data + first, rows.stride, rows.width - first, rows.in_chunks};
}

// A warp loads 16 rows, those that it owns in the result. Each lane always has the same columns.
template <typename Element, int kWidth>
struct RowLoader {
  static constexpr int kPerChunk = 16 / sizeof(Element), kChunks = kWidth / kPerChunk;
  static constexpr int kLanes = kChunks < kWarp ? kChunks : kWarp;  // that load a row
  static constexpr int kChunksPerLane = kChunks / kLanes;
  static constexpr int kPerLane = kChunksPerLane * kPerChunk;

  // Column of the lane's element n, a compile-time constant in unrolled loops.
  TK_DEVICE_METHOD int column(int n) const {
    return (lane_ % kLanes + n / kPerChunk * kLanes) * kPerChunk + n % kPerChunk;
  }

  // Stores map(row, n, x) for each element x of the rows first, first + 1, ... of a head to the
  // tile, then calls end_row(row) with all lanes of the row. Columns beyond the width are 0, and so
  // are rows outside `live`, which are not read and may hold NaN.
  template <typename Number, int kRows, typename Map, typename EndRow>
  TK_DEVICE_METHOD void load(const SharedTile<Number, kRows, kWidth>& tile,
                             const Rows<const Element>& rows, int first, const TokenRange& live,
                             const Map& map, const EndRow& end_row) const {
    constexpr int kStep = kWarp / kLanes, kIterations = 16 / kStep;
    constexpr int kBatch = kIterations * kChunksPerLane <= 4 ? kIterations : 4 / kChunksPerLane;
    const int begin = 16 * warp_index() + lane_ / kLanes;
#pragma unroll 1
    for (int n = 0; n < kIterations; n += kBatch) {
      Chunk chunks[kBatch][kChunksPerLane];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = begin + (n + i) * kStep;
        if (live.holds(first + row)) read(rows, first + row, chunks[i]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = begin + (n + i) * kStep;
        store(tile, row, live.holds(first + row), rows.width, chunks[i], map);
        end_row(row);
      }
    }
  }

  // Adds the lanes that load the same row.
  TK_DEVICE_METHOD float sum_of_row(float x) const {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      x += __shfl_xor_sync(~0u, x, distance);
    }
    return x;
  }

  // Writes the sums over the warp's rows of the lanes' elements to sums[column].
  TK_DEVICE_METHOD void store_sums(const float (&x)[kPerLane], float* sums) const {
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) {
      float sum = x[n];
#pragma unroll
      for (int distance = kLanes; distance < kWarp; distance *= 2) {
        sum += __shfl_xor_sync(~0u, sum, distance);
      }
      if (lane_ < kLanes) sums[column(n)] = sum;
    }
  }

 private:
  // Opaque, so that addresses do not occupy registers between loads.
  const int lane_ = opaque(lane_index());

  struct alignas(16) Chunk {
    Element x[kPerChunk];
  };

  // Elements beyond the width are not read.
  TK_DEVICE_METHOD void read(const Rows<const Element>& rows, int row,
                             Chunk (&chunks)[kChunksPerLane]) const {
#pragma unroll
    for (int c = 0; c < kChunksPerLane; ++c) {
      const int at = column(c * kPerChunk);
      const Element* const from = rows.at(row) + at;
      if (rows.in_chunks) {
        if (at < rows.width) chunks[c] = *reinterpret_cast<const Chunk*>(from);
      } else {
#pragma unroll
        for (int e = 0; e < kPerChunk; ++e) {
          if (at + e < rows.width) chunks[c].x[e] = from[e];
        }
      }
    }
  }

  template <typename Number, int kRows, typename Map>
  TK_DEVICE_METHOD void store(const SharedTile<Number, kRows, kWidth>& tile, int row, bool is_live,
                              int width, const Chunk (&chunks)[kChunksPerLane],
                              const Map& map) const {
    float x[kPerLane];
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) {
      const bool is_read = is_live && column(n) < width;
      x[n] = is_read ? map(row, n, to_float(chunks[n / kPerChunk].x[n % kPerChunk])) : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kPerLane; n += 2) store_two(tile.at(row, column(n)), x[n], x[n + 1]);
  }
};

}  // namespace tk::cuda
