// 64 rows of o, dk or dv on their way to global memory.
#pragma once

#include "cuda/sm90/gemm.cuh"
#include "cuda/sm90/warpgroups.cuh"

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
          a.varlen.cu_seqlens_q != nullptr};
}

// By a group: its accumulator is rows `to` .. to + 63 of the result, columns from `column` on, the
// first of a panel. It goes through shared memory, rows `at` .. at + 63 of a tile that nobody reads
// any more, and from there by TMA, which leaves out what is behind the tensor. Behind the last row
// of one of packed sequences is the next one's.
template <typename Element, int kN, typename Tile>
TK_DEVICE void store(const Accumulator<1, kN>& x, const Result<Element>& result, int to,
                     const Tile& tile, int at, int column = 0) {
  constexpr int kColumns = 8 * kN;
  static_assert(kColumns % Tile::kPanel == 0 && kColumns <= Tile::kWidth);
  const int row = group_warp() * 16;
  if (result.packed && to + kGroupRows > result.end) {
    x.for_each_pair([&](int r, int c, float first, float second) {
      const int i = to + row + r;
      if (i < result.end) result.rows.store_pair(i, column + c, first, second);
    });
    group_sync();
    return;
  }
  stage<kColumns / 16>(tile, at + row, column, [&](int k) {
    Fragment<Element> rounded;
    to_a(rounded, x, 0, k);
    return rounded;
  });
  fence_async();
  group_sync();
  if (is_first_of_group()) {
#pragma unroll
    for (int c = 0; c < kColumns; c += Tile::kPanel) {
      store_tensor(result.map, tile.at(at, column + c),
                   {column + c, result.first + to, result.head, result.entry});
    }
    commit_stores();
    wait_stores_read<0>();
  }
}

}  // namespace tk::cuda::sm90
