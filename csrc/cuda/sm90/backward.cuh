// Backward pass on Hopper. A CTA owns one key block of one key head. Its producer warp loads the
// query tiles that see these keys, for every query head of the group. Two consumer warpgroups split
// dk and dv by rows (backward_by_rows.cuh and, with less of a tile at a time,
// backward_by_halves.cuh) or by columns (backward_by_columns.cuh). dq is accumulated in float32 in
// global memory and converted by the postprocess kernel. Several CTAs share a key block where there
// are few: the postprocess kernel adds their dk and dv. In deterministic mode the key blocks
// accumulate in ascending order, as in sm80/backward.cuh. See docs/hopper.md.
#pragma once

#include "cuda/common/store_rows.cuh"
#include "cuda/sm90/backward_by_columns.cuh"
#include "cuda/sm90/backward_by_halves.cuh"
#include "cuda/sm90/backward_by_rows.cuh"

namespace tk::cuda::sm90 {

// Selects the main loop: backward_mainloop is overloaded on the shape.
template <typename Element, int kWidth, int kVWidth>
using BackwardShape =
    std::conditional_t<kWidth <= 128, ShapeByRows<Element, kWidth>,
                       std::conditional_t<kWidth <= 192, ShapeByHalves<Element, kWidth, kVWidth>,
                                          ShapeByColumns<Element, kWidth, kVWidth>>>;

template <typename Shape, typename Masks>
TK_DEVICE void backward(const BackwardArguments& a, unsigned char* memory) {
  constexpr HopperBackwardTile kTile = Shape::kTile;
  memory = align_shared(memory, kSwizzleAtomBytes);
  const Shape shared(memory);
  // Placed outside the tiles: TMA writes those through the async proxy, which would need a fence.
  auto* const program_slot = reinterpret_cast<unsigned char*>(&shared.k.tile_info({}));
  const int program = program_of(a.dq_semaphore ? a.block_counter : nullptr, program_slot);
  const auto key_block = KeyBlock::of<Shape::kN>(program, a.order, a.by_splits, a.varlen);
  if (key_block.n * Shape::kN >= sequence_of(a, key_block.b).N) return;
  if (threadIdx.x == 0) {
    shared.k.init(kTile.kConsumerWarps);
    shared.v.init(kTile.kConsumerWarps);
    shared.q.init(kTile.kConsumerWarps);
    shared.d_o.init(kTile.kConsumerWarps);
    shared.row_stats.init(kTile.kConsumerWarps);
    fence_mbarrier_init();
  }
  __syncthreads();

  if (threadIdx.x < kWarpgroupThreads) {
    release_registers<Shape::kProducerRegisters>();
    if (warp_index() == 0) load(a, shared, key_block);
  } else {
    request_registers<Shape::kRegisters>();
    backward_mainloop<Masks>(a, shared, key_block);
  }
}

template <typename Element, int kWidth, int kVWidth>
TK_KERNEL(hopper_backward_tile(kWidth).threads(), 1)
backward_kernel(const __grid_constant__ BackwardArguments a) {
  using Shape = BackwardShape<Element, kWidth, kVWidth>;
  TK_SHARED_MEMORY(memory);
  backward<Shape, NoDropout>(a, memory);
}

// With dropout. A separate kernel, because a branch would cost registers in the case without.
template <typename Element, int kWidth, int kVWidth>
TK_KERNEL(hopper_backward_tile(kWidth).threads(), 1)
dropout_backward_kernel(const __grid_constant__ BackwardArguments a) {
  using Shape = BackwardShape<Element, kWidth, kVWidth>;
  TK_SHARED_MEMORY(memory);
  backward<Shape, WithDropout>(a, memory);
}

// One warp's accumulator, as the sum of `parts` in memory, `stride` elements apart.
template <int kColumns>
TK_DEVICE Accumulator<1, kColumns / 8> sum_of(const float* part, int parts = 1,
                                              int64_t stride = 0) {
  Accumulator<1, kColumns / 8> sum;
  sum.clear();
  for (const float* from = first_float4(part); parts > 0; --parts, from += stride) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const float4 x = *reinterpret_cast<const float4*>(from + n * kFloat4Step);
      sum.x[0][n][0] += x.x, sum.x[0][n][1] += x.y, sum.x[0][n][2] += x.z, sum.x[0][n][3] += x.w;
    }
  }
  return sum;
}

// Scales and rounds the sums of dq of a query tile into dq.
template <typename Shape>
TK_DEVICE void store_dq(const BackwardArguments& a, int program) {
  constexpr int kM = Shape::kM;
  const BackwardParams& p = a.params;
  const auto [seq, h, block] = query_tile_of<kM>(a, a.row_tiles, program);
  if (block * kM >= seq.M) return;
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroupThreads;
  const int64_t part =
      int64_t{query_tile<kM>(a, a.row_tiles, seq, h, block)} * Shape::kDqParts + warp_index();
  const auto dq = sum_of<Shape::kDqColumns>(a.dq_sums + part * Shape::kDqElements);
  const auto rows = rows_of<typename Shape::Element>(p.dq, seq.at, h, seq.first_q, p.D);
  const int row = block * kM + Shape::dq_row(warpgroup) + warp_in_warpgroup() * 16;
  store_rows(rows, dq, row, Shape::dq_column(warpgroup), seq.M, a.score.scale);
}

// Adds, scales and rounds the sums of the CTAs that share a key block into dk and dv.
template <typename Shape>
TK_DEVICE void store_keys(const BackwardArguments& a, int index) {
  using Element = typename Shape::Element;
  const BackwardParams& p = a.params;
  const int splits = a.by_splits.divisor(), warpgroup = warp_index() / kWarpgroupWarps;
  const auto key_block = KeyBlock::of<Shape::kN>(index * splits, a.order, a.by_splits, a.varlen);
  const Sequence seq = sequence_of(a, key_block.b);
  if (key_block.n * Shape::kN >= seq.N || warpgroup >= Shape::kConsumers) return;
  const float* const sums = key_sums<Shape>(a, key_block.program, warp_index());
  const int64_t stride = key_sums<Shape>(a, key_block.program + 1, warp_index()) - sums;
  const int row = key_block.n * Shape::kN + Shape::key_row(warpgroup) + warp_in_warpgroup() * 16;
  const auto dk = sum_of<Shape::kDkColumns>(sums, splits, stride);
  const auto dk_rows = rows_of<Element>(p.dk, seq.at, key_block.h_kv, seq.first_k, p.D);
  store_rows(dk_rows, dk, row, Shape::dk_column(warpgroup), seq.N, a.score.scale);
  const auto dv = sum_of<Shape::kDvColumns>(sums + 16 * Shape::kDkColumns, splits, stride);
  const auto dv_rows = rows_of<Element>(p.dv, seq.at, key_block.h_kv, seq.first_k, p.D_v);
  store_rows(dv_rows, dv, row, Shape::dv_column(warpgroup), seq.N, a.dropout.factor);
}

// One CTA per query tile and head, and then one per key block if CTAs share them.
template <typename Element, int kWidth, int kVWidth>
TK_KERNEL((BackwardShape<Element, kWidth, kVWidth>::kDqParts * kWarp), 1)
backward_postprocess_kernel(const __grid_constant__ BackwardArguments a) {
  using Shape = BackwardShape<Element, kWidth, kVWidth>;
  const int program = static_cast<int>(blockIdx.x);
  if (program < a.row_programs) {
    store_dq<Shape>(a, program);
  } else {
    store_keys<Shape>(a, program - a.row_programs);
  }
}

}  // namespace tk::cuda::sm90
