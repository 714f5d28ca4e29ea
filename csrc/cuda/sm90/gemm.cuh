// Asynchronous matrix products of swizzled shared-memory tiles by one warpgroup (wgmma). Each warp
// holds 16 rows of the accumulator in the register layout of mma.sync, so the mask, score and
// softmax code of sm80 applies unchanged.
//
// start_gemm_nt: c = a b^T; start_gemm_nn: c += a b; start_gemm_tn: c = a^T b. Each is in flight
// until wait_gemm.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/platform/sm90_wgmma.h"

namespace tk::cuda::sm90 {

constexpr int kSwizzleAtomBytes = 1024;  // swizzle atom: 8 rows of 128 bytes

template <typename Tile>
using ElementOf = std::remove_pointer_t<decltype(Tile::data)>;

template <int kN>
TK_DEVICE float (&registers_of(Accumulator<1, kN>& c))[4 * kN] {
  return reinterpret_cast<float (&)[4 * kN]>(c.x);
}

// The descriptor advanced by a byte offset. Its address field lies in the lower 32 bits and cannot
// overflow.
TK_DEVICE uint64_t advance(uint64_t descriptor, int bytes) {
  constexpr uint64_t kUpper = ~uint64_t{0} << 32;
  return (descriptor & kUpper) |
         static_cast<uint32_t>(descriptor + static_cast<uint64_t>(bytes >> 4));
}

// K-major operand (a, or b^T): k runs along the tile's rows. `row` is a multiple of 8.
template <typename Tile>
TK_DEVICE uint64_t k_major_descriptor(const Tile& tile, int row) {
  return matrix_descriptor(tile.at(row, 0), 16, kSwizzleAtomBytes, Swizzle::k128);
}

// MN-major operand (a^T, or b): k runs down the tile's columns. `column` is the first of a panel.
template <typename Tile>
TK_DEVICE uint64_t mn_major_descriptor(const Tile& tile, int column) {
  constexpr int kPanelsBytes = Tile::kRows * Tile::kPanelBytes;
  return matrix_descriptor(tile.at(0, column), kPanelsBytes, kSwizzleAtomBytes, Swizzle::k128);
}

// Byte offset of step k, a compile-time multiple of 16.
template <typename Tile>
TK_DEVICE int k_major_step(int k) {
  return k / Tile::kPanel * Tile::kRows * Tile::kPanelBytes +
         k % Tile::kPanel * static_cast<int>(sizeof(ElementOf<Tile>));
}
template <typename Tile>
TK_DEVICE int mn_major_step(int k) {
  return k * Tile::kPanelBytes;
}

// c = a b^T with 64 rows of a and 8 kN rows of b.
template <typename TileA, typename TileB, int kN>
TK_DEVICE void start_gemm_nt(Accumulator<1, kN>& c, const TileA& a_tile, int row,
                             const TileB& b_tile, int b_row = 0) {
  using Element = ElementOf<TileA>;
  static_assert(TileB::kRows % (8 * kN) == 0 && TileA::kWidth == TileB::kWidth);
  const uint64_t a = opaque(k_major_descriptor(a_tile, row)), b = k_major_descriptor(b_tile, b_row);
  wgmma_fence();
#pragma unroll
  for (int d = 0; d < TileA::kWidth; d += 16) {
    wgmma<Major::kK, Major::kK>(registers_of(c), advance(a, k_major_step<TileA>(d)),
                                advance(b, k_major_step<TileB>(d)), Element{}, d > 0);
  }
  wgmma_commit();
}

// c += a b with a in registers, 16 columns per fragment, and as many rows of b from b_row on.
template <typename Element, int kSteps, typename TileB, int kN>
TK_DEVICE void start_gemm_nn(Accumulator<1, kN>& c, const Fragment<Element> (&a)[kSteps],
                             const TileB& b_tile, int b_row = 0) {
  static_assert(TileB::kRows % (16 * kSteps) == 0 && TileB::kWidth == 8 * kN);
  const uint64_t b = advance(mn_major_descriptor(b_tile, 0), mn_major_step<TileB>(b_row));
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    wgmma<Major::kMN>(registers_of(c), a[k].x[0], advance(b, mn_major_step<TileB>(16 * k)),
                      Element{}, true);
  }
  wgmma_commit();
}

// c += a b with 64 rows of a from `row` on, in shared memory, and 8 kN columns of b from `column`
// on; of kDepth columns of a, and rows of b, from `first` on.
template <int kDepth, typename TileA, typename TileB, int kN>
TK_DEVICE void start_gemm_nn(Accumulator<1, kN>& c, const TileA& a_tile, int row,
                             const TileB& b_tile, int column, int first = 0) {
  using Element = ElementOf<TileA>;
  static_assert(TileA::kWidth == TileB::kRows && TileA::kWidth % kDepth == 0);
  static_assert(kDepth == TileA::kWidth || kDepth <= TileA::kPanel);
  const uint64_t a = advance(k_major_descriptor(a_tile, row), k_major_step<TileA>(first)),
                 b = advance(mn_major_descriptor(b_tile, column), mn_major_step<TileB>(first));
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    wgmma<Major::kK, Major::kMN>(registers_of(c), advance(a, k_major_step<TileA>(k)),
                                 advance(b, mn_major_step<TileB>(k)), Element{}, true);
  }
  wgmma_commit();
}

// c = a^T b with 64 columns of a from `row` on, 8 kN columns of b from `column` on, and kRows rows
// of both from `first` on.
template <int kRows, typename TileA, typename TileB, int kN>
TK_DEVICE void start_gemm_tn(Accumulator<1, kN>& c, const TileA& a_tile, int row,
                             const TileB& b_tile, int column, int first = 0) {
  using Element = ElementOf<TileA>;
  static_assert(TileA::kRows == TileB::kRows && TileA::kRows % kRows == 0);
  const uint64_t a = advance(mn_major_descriptor(a_tile, row), mn_major_step<TileA>(first)),
                 b = advance(mn_major_descriptor(b_tile, column), mn_major_step<TileB>(first));
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kRows; k += 16) {
    wgmma<Major::kMN, Major::kMN>(registers_of(c), advance(a, mn_major_step<TileA>(k)),
                                  advance(b, mn_major_step<TileB>(k)), Element{}, k > 0);
  }
  wgmma_commit();
}

// Waits until at most the kPending latest products are in flight; c belongs to a completed one.
template <int kPending, int kN>
TK_DEVICE void wait_gemm(Accumulator<1, kN>& c) {
  wgmma_wait<kPending>();
  wgmma_hold(registers_of(c));
}

// Stores a warp's 16 rows to a tile, from (row, column) on; fragment(k) holds columns [16 k, 16 k +
// 16). The columns must not start within one panel and end in another. Before wgmma or TMA reads
// them, all writing threads call fence_async and then synchronise.
template <int kFragments, typename Tile, typename FragmentOf>
TK_DEVICE void store_fragments(const Tile& tile, int row, int column, const FragmentOf& fragment) {
  const int lane = opaque(lane_index());  // keeps addresses out of loop-carried registers
  const int lane_offset = opaque(tile.offset(row + lane % 16, column + lane / 16 * 8));
#pragma unroll
  for (int k = 0; k < kFragments; ++k) {
    const Fragment<ElementOf<Tile>> x = fragment(k);
    store_matrices(tile.moved(lane_offset, 0, 16 * k), x.x[0]);
  }
}

// The same for 8 kN columns of an accumulator, rounded.
template <typename Tile, int kN>
TK_DEVICE void store_rounded(const Tile& tile, int row, int column, const Accumulator<1, kN>& x) {
  store_fragments<kN / 2>(tile, row, column, [&](int k) {
    Fragment<ElementOf<Tile>> rounded;
    to_a(rounded, x, 0, k);
    return rounded;
  });
}

}  // namespace tk::cuda::sm90
