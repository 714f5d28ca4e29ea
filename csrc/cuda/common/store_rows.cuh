// Stores of accumulators to rows in global memory.
#pragma once

#include "cuda/common/mma.cuh"

namespace tk::cuda {

// Transposes words[0 .. 3] of four adjacent lanes: afterwards word j of lane q is word q of lane j.
TK_DEVICE void transpose_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = (lane_index() & distance) != 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n & distance) continue;
      uint32_t &low = words[n], &high = words[n + distance];
      const uint32_t received = __shfl_xor_sync(~0u, upper ? low : high, distance);
      (upper ? low : high) = received;
    }
  }
}

// store_rows() by 16 bytes at a time, for rows that consist of 16-byte chunks.
template <typename Element, int kM, int kN>
TK_DEVICE void store_chunks(const Rows<Element>& rows, const Accumulator<kM, kN>& x, int row,
                            int column, int end, float scale) {
#pragma unroll
  for (int k = 0; k < kM * 2 * (kN / 4); ++k) {
    const int m = k / 2 / (kN / 4), half = k % 2, n = k / 2 % (kN / 4) * 4;
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float (&pairs)[4] = x.x[m][n + w];
      words[w] = pack(pairs[2 * half] * scale, pairs[2 * half + 1] * scale, Element{});
    }
    transpose_quad(words);
    const int i = row + 16 * m + row_of(2 * half), c = column + 8 * (n + lane_index() % 4);
    if (i < end && c < rows.width) {
      *reinterpret_cast<uint4*>(rows.at(i) + c) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// Stores a warp's accumulator, scaled and rounded, at row `row` and column `column`. Rows from
// `end` on are left out.
template <typename Element, int kM, int kN>
TK_DEVICE void store_rows(const Rows<Element>& rows, const Accumulator<kM, kN>& x, int row,
                          int column, int end, float scale) {
  if constexpr (sizeof(Element) == 2 && kN % 4 == 0) {
    if (rows.in_chunks) return store_chunks(rows, x, row, column, end, scale);
  }
  x.for_each_pair([&](int i, int j, float first, float second) {
    if (row + i < end) rows.store_pair(row + i, column + j, first * scale, second * scale);
  });
}

}  // namespace tk::cuda
