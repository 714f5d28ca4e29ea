// Epilogue: stores 64 rows of o, dk or dv to global memory.
#pragma once

#include "cuda/sm90/gemm.cuh"
#include "cuda/sm90/warpgroups.cuh"

namespace tk::cuda::sm90 {

// One head of an output tensor, for one sequence.
template <typename Element>
struct OutputTensor {
  const TensorMap& map;
  Rows<Element> rows;  // starting at the sequence's first row
  int first, end;      // first row in memory; number of rows
  int head, entry;
  bool is_varlen;
};

template <typename Element, typename Params>
TK_DEVICE OutputTensor<Element> output_of(const Arguments<Params>& a, const TensorMap& map,
                                          const Strided& x, int entry, int head, int first, int end,
                                          int64_t width) {
  return {map,
          rows_of<Element>(x, entry, head, first, width),
          first,
          end,
          head,
          entry,
          a.varlen.cu_seqlens_q != nullptr};
}

// Stores a warpgroup's accumulator to output rows [output_row, output_row + 64), columns from
// `column` on (the first of a panel). Staged through rows [tile_row, tile_row + 64) of a tile that
// is no longer read, then stored by TMA, which skips rows past the end of the tensor. With varlen
// the rows past the end belong to the next sequence, so a partial block is stored from registers.
// So is one that begins before the first row, where TMA cannot store. TMA reads the tile until the
// leader of the warpgroup has called wait_stores_read<0>.
template <typename Element, int kN, typename Tile>
TK_DEVICE void store(const Accumulator<1, kN>& x, const OutputTensor<Element>& output,
                     int output_row, const Tile& tile, int tile_row, int column = 0) {
  constexpr int kColumns = 8 * kN;
  static_assert(kColumns % Tile::kPanel == 0 && kColumns <= Tile::kWidth);
  const int warp_row = warp_in_warpgroup() * 16;
  if (output_row < 0 || (output.is_varlen && output_row + kWarpgroupRows > output.end)) {
    x.for_each_pair([&](int r, int c, float first, float second) {
      const int i = output_row + warp_row + r;
      if (i >= 0 && i < output.end) output.rows.store_pair(i, column + c, first, second);
    });
    consumer_sync();
    return;
  }
  store_rounded(tile, tile_row + warp_row, column, x);
  fence_async();
  consumer_sync();
  if (is_warpgroup_leader()) {
#pragma unroll
    for (int c = 0; c < kColumns; c += Tile::kPanel) {
      store_tensor(output.map, tile.at(tile_row, column + c),
                   {column + c, output.first + output_row, output.head, output.entry});
    }
    commit_stores();
  }
}

}  // namespace tk::cuda::sm90
