// Backward pass on Hopper. A CTA owns one key block of one key head. Its producer warp loads the
// query tiles that see these keys, for every query head of the group. Two consumer warpgroups split
// dk and dv by rows (backward_by_rows.cuh and, with less of a tile at a time,
// backward_by_halves.cuh) or by columns (backward_by_columns.cuh). dq is accumulated in float32 in
// global memory and converted by the dq postprocess kernel. In deterministic mode the key blocks
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

template <typename Shape, typename DropoutMask>
TK_DEVICE void backward(const BackwardArguments& a, unsigned char* memory) {
  constexpr HopperBackwardTile kTile = Shape::kTile;
  memory = align_shared(memory, kSwizzleAtomBytes);
  const Shape shared(memory);
  DropoutMask dropout_mask(memory + Shape::kBytes - kSwizzleAtomBytes);
  // Placed outside the tiles: TMA writes those through the async proxy, which would need a fence.
  auto* const program_slot = reinterpret_cast<unsigned char*>(&shared.k.tile_info({}));
  const int program = program_of(a.dq_semaphore ? a.block_counter : nullptr, program_slot);
  const auto key_block = KeyBlock::of(program, a.blocks, static_cast<int>(a.params.H_kv));
  if (key_block.n * Shape::kN >= sequence_of(a, key_block.b).N) return;
  if (threadIdx.x == 0) {
    shared.k.init(kTile.kConsumerWarps);
    shared.v.init(kTile.kConsumerWarps);
    shared.q.init(kTile.kConsumerWarps);
    shared.d_o.init(kTile.kConsumerWarps);
    shared.row_stats.init(kTile.kConsumerWarps + DropoutMask::kRowStatsConsumers);
    dropout_mask.init();
    fence_mbarrier_init();
  }
  __syncthreads();

  if (threadIdx.x < kWarpgroupThreads) {
    release_registers<DropoutMask::kProducerRegisters>();
    if (warp_index() == 0) {
      load(a, shared, key_block);
    } else {
      dropout_mask.generate(a, shared, key_block);
    }
  } else {
    request_registers<DropoutMask::kRegisters>();
    backward_mainloop(a, shared, key_block, dropout_mask);
  }
}

template <typename Element, int kWidth, int kVWidth>
TK_KERNEL(hopper_backward_tile(kWidth).threads(), 1)
backward_kernel(const __grid_constant__ BackwardArguments a) {
  using Shape = BackwardShape<Element, kWidth, kVWidth>;
  TK_SHARED_MEMORY(memory);
  backward<Shape, NoDropoutMask<Shape>>(a, memory);
}

// With dropout. A separate kernel, because a branch would cost registers in the case without.
template <typename Element, int kWidth, int kVWidth>
TK_KERNEL(hopper_backward_tile(kWidth).threads(), 1)
dropout_backward_kernel(const __grid_constant__ BackwardArguments a) {
  using Shape = BackwardShape<Element, kWidth, kVWidth>;
  TK_SHARED_MEMORY(memory);
  backward<Shape, DropoutMask<Shape>>(a, memory);
}

// dq postprocess: scales and rounds dq_sums into dq. One CTA per query tile and head.
template <typename Element, int kWidth, int kVWidth>
TK_KERNEL((BackwardShape<Element, kWidth, kVWidth>::kDqParts * kWarp), 1)
dq_postprocess_kernel(const __grid_constant__ BackwardArguments a) {
  using Shape = BackwardShape<Element, kWidth, kVWidth>;
  constexpr int kM = Shape::kM;
  const BackwardParams& p = a.params;
  const int program = static_cast<int>(blockIdx.x), H_q = static_cast<int>(p.H_q);
  const int h = program / a.row_tiles % H_q, block = program % a.row_tiles;
  const Sequence seq = sequence_of(a, program / a.row_tiles / H_q);
  if (block * kM >= seq.M) return;
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroupThreads;
  const int64_t part = int64_t{tile_of<kM>(a, seq, h, block)} * Shape::kDqParts + warp_index();
  const float* const first = first_float4(a.dq_sums + part * Shape::kDqElements);
  Accumulator<1, Shape::kDqColumns / 8> dq;
#pragma unroll
  for (int n = 0; n < Shape::kDqColumns / 8; ++n) {
    const float4 x = *reinterpret_cast<const float4*>(first + n * kFloat4Step);
    dq.x[0][n][0] = x.x, dq.x[0][n][1] = x.y, dq.x[0][n][2] = x.z, dq.x[0][n][3] = x.w;
  }
  const auto rows = rows_of<Element>(p.dq, seq.at, h, seq.first_q, p.D);
  const float scale = a.score.scale;
  const int row = block * kM + Shape::dq_row(warpgroup) + warp_in_warpgroup() * 16;
  const int column = Shape::dq_column(warpgroup);
  store_rows(rows, dq, row, column, seq.M, scale);
}

}  // namespace tk::cuda::sm90
