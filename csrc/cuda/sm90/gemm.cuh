// Products of swizzled tiles by a warpgroup. An accumulator's 16 rows are those of the warp: what
// wgmma leaves in its registers lies as mma.sync has it, so masks, scores and softmax are sm80's.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/platform/sm90_wgmma.h"

namespace tk::cuda::sm90 {

constexpr int kPatternBytes = 1024;  // eight swizzled rows of 128 bytes

template <typename Tile>
using ElementOf = std::remove_pointer_t<decltype(Tile::data)>;

template <int kN>
TK_DEVICE float (&numbers(Accumulator<1, kN>& c))[4 * kN] {
  return reinterpret_cast<float (&)[4 * kN]>(c.x);
}

// Further in shared memory: the address is in the lower half, and does not reach beyond its bits.
TK_DEVICE uint64_t advance(uint64_t descriptor, int bytes) {
  constexpr uint64_t kUpper = ~uint64_t{0} << 32;
  return (descriptor & kUpper) |
         static_cast<uint32_t>(descriptor + static_cast<uint64_t>(bytes >> 4));
}

// Rows from `row` on, a multiple of 8, as a, or as columns of b: k runs along the tile's rows.
template <typename Tile>
TK_DEVICE uint64_t as_rows(const Tile& tile, int row) {
  return matrix_descriptor(tile.at(row, 0), 16, kPatternBytes, Swizzle::k128);
}

// Columns from `column` on, the first of a panel, as a^T, or as b: k runs down the tile's columns.
template <typename Tile>
TK_DEVICE uint64_t as_columns(const Tile& tile, int column) {
  constexpr int kPanelsBytes = Tile::kRows * Tile::kPanelBytes;
  return matrix_descriptor(tile.at(0, column), kPanelsBytes, kPatternBytes, Swizzle::k128);
}

// How much further k is, a multiple of 16; a constant.
template <typename Tile>
TK_DEVICE int step_in_rows(int k) {
  return k / Tile::kPanel * Tile::kRows * Tile::kPanelBytes +
         k % Tile::kPanel * static_cast<int>(sizeof(ElementOf<Tile>));
}
template <typename Tile>
TK_DEVICE int step_in_columns(int k) {
  return k * Tile::kPanelBytes;
}

// c = a b^T, of 64 rows of a and 8 kN of b. Under way until it is waited for, like the others.
template <typename TileA, typename TileB, int kN>
TK_DEVICE void start_scores(Accumulator<1, kN>& c, const TileA& a_tile, int row,
                            const TileB& b_tile, int b_row = 0) {
  using Element = ElementOf<TileA>;
  static_assert(TileB::kRows % (8 * kN) == 0 && TileA::kWidth == TileB::kWidth);
  const uint64_t a = opaque(as_rows(a_tile, row)), b = as_rows(b_tile, b_row);
  wgmma_fence();
#pragma unroll
  for (int d = 0; d < TileA::kWidth; d += 16) {
    wgmma<Major::kK, Major::kK>(numbers(c), advance(a, step_in_rows<TileA>(d)),
                                advance(b, step_in_rows<TileB>(d)), Element{}, d > 0);
  }
  wgmma_commit();
}

// c += a b, of which a is in registers: 16 columns in each fragment.
template <typename Element, int kSteps, typename TileB, int kN>
TK_DEVICE void start_sum(Accumulator<1, kN>& c, const Fragment<Element> (&a)[kSteps],
                         const TileB& b_tile) {
  static_assert(TileB::kRows == 16 * kSteps && TileB::kWidth == 8 * kN);
  const uint64_t b = as_columns(b_tile, 0);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    wgmma<Major::kMN>(numbers(c), a[k].x[0], advance(b, step_in_columns<TileB>(16 * k)), Element{},
                      true);
  }
  wgmma_commit();
}

// The same with all of a, 64 rows, in shared memory, and 8 kN columns of b from `column` on.
template <typename TileA, typename TileB, int kN>
TK_DEVICE void start_sum(Accumulator<1, kN>& c, const TileA& a_tile, const TileB& b_tile,
                         int column) {
  using Element = ElementOf<TileA>;
  static_assert(TileA::kRows == 64 && TileA::kWidth == TileB::kRows);
  const uint64_t a = as_rows(a_tile, 0), b = as_columns(b_tile, column);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < TileA::kWidth; k += 16) {
    wgmma<Major::kK, Major::kMN>(numbers(c), advance(a, step_in_rows<TileA>(k)),
                                 advance(b, step_in_columns<TileB>(k)), Element{}, true);
  }
  wgmma_commit();
}

// c = a^T b, of 64 columns of a from `row` on and 8 kN columns of b from `column` on.
template <typename TileA, typename TileB, int kN>
TK_DEVICE void start_turned(Accumulator<1, kN>& c, const TileA& a_tile, int row,
                            const TileB& b_tile, int column) {
  using Element = ElementOf<TileA>;
  static_assert(TileA::kRows == TileB::kRows);
  const uint64_t a = as_columns(a_tile, row), b = as_columns(b_tile, column);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < TileA::kRows; k += 16) {
    wgmma<Major::kMN, Major::kMN>(numbers(c), advance(a, step_in_columns<TileA>(k)),
                                  advance(b, step_in_columns<TileB>(k)), Element{}, k > 0);
  }
  wgmma_commit();
}

// Until all but the kPending latest products are there; c is of those that are.
template <int kPending, int kN>
TK_DEVICE void wait_product(Accumulator<1, kN>& c) {
  wgmma_wait<kPending>();
  wgmma_hold(numbers(c));
}

// A warp's 16 rows of a tile, from `row` on, and its columns from `column` on: fragment(k) is of 16
// k
// .. 16 k + 15 of them. They do not begin within one panel and end in another. Before wgmma or TMA
// read them all threads that wrote call fence_async, and then there is a barrier.
template <int kFragments, typename Tile, typename FragmentOf>
TK_DEVICE void stage(const Tile& tile, int row, int column, const FragmentOf& fragment) {
  const int lane = opaque(lane_index());  // so that no address is kept in a register for a loop
  const int lane_offset = opaque(tile.offset(row + lane % 16, column + lane / 16 * 8));
#pragma unroll
  for (int k = 0; k < kFragments; ++k) {
    const Fragment<ElementOf<Tile>> x = fragment(k);
    store_matrices(tile.moved(lane_offset, 0, 16 * k), x.x[0]);
  }
}

}  // namespace tk::cuda::sm90
