// 64 rows of o, dk or dv on their way to global memory.
#pragma once

#include "groups.cuh"
#include "products.cuh"

namespace tk::cuda::sm90 {

// A head of a tensor of results, of one sequence.
template <typename Element>
struct Result {
  const TensorMap& map;
  Rows<Element> rows;  // from the sequence's first one on
  int first, end;      // where they begin in memory; how many there are
  int head, entry;
  bool packed;
};

template <typename Element, typename Params>
TK_DEVICE Result<Element> result_of(const Arguments<Params>& a, const TensorMap& map,
                                    const Strided& x, int entry, int head, int first, int end,
                                    int64_t width) {
  return {map,
          rows_of<Element>(x, entry, head, first, width),
          first,
          end,
          head,
          entry,
          a.packing.cu_seqlens_q != nullptr};
}

// By a group: its accumulator is rows `to` .. to + 63 of the result. It goes through shared memory,
// rows `at` .. at + 63 of a tile that nobody reads any more, and from there by TMA, which leaves
// out what is behind the tensor. Behind the last row of one of packed sequences is the next one's.
template <typename Element, int kN, typename Tile>
TK_DEVICE void store(const Accumulator<1, kN>& x, const Result<Element>& result, int to,
                     const Tile& tile, int at) {
  static_assert(Tile::kWidth == 8 * kN);
  const int row = group_warp() * 16;
  if (result.packed && to + kGroupRows > result.end) {
    x.for_each_pair([&](int r, int column, float first, float second) {
      const int i = to + row + r;
      if (i < result.end) result.rows.store_pair(i, column, first, second);
    });
    group_sync();
    return;
  }
  stage(tile, at + row, [&](int k) {
    Fragment<Element> rounded;
    to_a(rounded, x, 0, k);
    return rounded;
  });
  fence_async();
  group_sync();
  if (is_first_of_group()) {
#pragma unroll
    for (int column = 0; column < Tile::kWidth; column += Tile::kPanel) {
      store_tensor(result.map, tile.at(at, column),
                   {column, result.first + to, result.head, result.entry});
    }
    commit_stores();
    wait_stores_read<0>();
  }
}

}  // namespace tk::cuda::sm90
