// Launch functions for one element type and width.
#pragma once

#include <algorithm>

#include "cuda/common/arena.h"
#include "cuda/common/launch_config.cuh"
#include "cuda/sm90/backward.cuh"
#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/kernels.h"

namespace tk::cuda::sm90 {

template <typename Element>
constexpr TensorType kTensorType = TensorType::kHalf;
template <>
inline constexpr TensorType kTensorType<BFloat16> = TensorType::kBFloat16;

// Tensor map of (entries, heads, length, width); one copy moves `rows` rows of one panel.
template <typename Element>
TensorMap tensor_map_of(const Strided& x, int64_t entries, int64_t heads, int64_t length,
                        int64_t width, int rows) {
  constexpr int kPanel = 128 / sizeof(Element);
  TensorBox tensor{x.data, kTensorType<Element>, 4, {}, {sizeof(Element)}, {}, Swizzle::k128};
  const int64_t sizes[] = {width, length, heads, entries};
  for (int n = 0; n < 4; ++n) {
    tensor.size[n] = static_cast<uint64_t>(sizes[n]);
    tensor.box[n] = n == 0 ? kPanel : n == 1 ? static_cast<uint32_t>(rows) : 1;
    // A dimension of size 1 may have any stride: it is never used.
    const int64_t stride = sizes[n] == 1 ? kPanel : x.stride[3 - n];
    if (n > 0) tensor.stride[n] = static_cast<uint64_t>(stride) * sizeof(Element);
  }
  return encode(tensor);
}

// True if some query tiles may see fewer keys than others.
inline bool has_uneven_tiles(const Problem& p, const LaunchArgs& launch) {
  const MaskParams& mask = p.mask;
  const bool every_diagonal = mask.diagonal_low <= 1 - p.M && mask.diagonal_high >= p.N - 1;
  return !every_diagonal || mask.key_start || mask.key_end || mask.block_mask ||
         launch.varlen.cu_seqlens_q;
}

constexpr size_t kForwardWorkspaceBytes = sizeof(int);  // TileScheduler::taken

static TK_KERNEL(kWarp, 1) clear_kernel(int* taken) {
  if (threadIdx.x == 0) *taken = 0;
}

template <typename Element, int kWidth, int kVWidth>
void launch_forward(const ForwardParams& p, const LaunchArgs& launch, void* workspace) {
  constexpr HopperForwardTile kTile = hopper_forward_tile(kWidth);
  const int64_t blocks = tiles_of(p.M, kTile.block_m(), launch.varlen);
  if (blocks * p.H_q * p.B == 0) return;
  const unsigned tiles = grid(blocks * p.H_q * p.B),
                 ctas = std::min(tiles, static_cast<unsigned>(multiprocessors().count));
  int* const taken =
      tiles > ctas && has_uneven_tiles(p, launch) ? static_cast<int*>(workspace) : nullptr;
  if (taken) TK_LAUNCH(clear_kernel, 1, kWarp, 0, launch.stream, taken);
  ForwardArguments a{
      {p, launch.varlen, dropout_of(p, launch), score_scale_of(p), static_cast<int>(blocks)},
      {forward_order(p, p.B, blocks, launch.max_seqlen_k), p.H_q / p.H_kv, taken},
      tensor_map_of<Element>(p.q, p.B, p.H_q, p.M, p.D, kTile.block_m()),
      tensor_map_of<Element>(p.k, p.B, p.H_kv, p.N, p.D, kTile.block_n),
      tensor_map_of<Element>(p.v, p.B, p.H_kv, p.N, p.D_v, kTile.block_n),
      tensor_map_of<Element>(p.o, p.B, p.H_q, p.M, p.D_v, kWarpgroupRows)};
  TK_LAUNCH((sm90::forward_kernel<Element, kWidth, kVWidth>), ctas, kTile.threads(),
            kTile.bytes(kWidth, kVWidth), launch.stream, a);
}

template <typename Shape>
struct BackwardSizes {
  static constexpr int kM = Shape::kM;
  int64_t row_tiles, key_blocks;       // of a head
  int64_t row_programs, key_programs;  // of all heads
  int64_t splits = 1;                  // CTAs that share a key block

  BackwardSizes(const BackwardParams& p, const LaunchArgs& launch)
      : row_tiles(tiles_of(p.M, kM, launch.varlen)),
        key_blocks(tiles_of(p.N, Shape::kN, launch.varlen)),
        row_programs(row_tiles * p.H_q * p.B),
        key_programs(key_blocks * p.H_kv * p.B) {
    if (p.N * p.H_kv * p.B == 0) return;
    // Not by max_seqlen_q: any upper bound of it gives the same bits.
    splits = key_block_splits(ceil_of(p.N, Shape::kN) * p.H_kv * p.B, key_programs,
                              ceil_of(p.M, kM) * (p.H_q / p.H_kv), has_uneven_tiles(p, launch),
                              multiprocessors().count);
  }
};

// Partitions the workspace.
template <typename Shape>
void lay_out(Arena& arena, const BackwardSizes<Shape>& sizes, BackwardArguments& a) {
  a.dq_sums = arena.take<float>(sizes.row_programs * Shape::kDqParts * Shape::kDqElements);
  a.dq_semaphore = arena.take<int>(sizes.row_programs * Shape::kDqParts);
  a.block_counter = arena.take<int>(1);
  a.row_stats = arena.take<float>(sizes.row_programs * RowStats<Shape::kM>::kStored);
  const int64_t keys = sizes.splits > 1 ? sizes.key_programs * sizes.splits * Shape::kN : 0;
  a.key_sums = arena.take<float>(keys * (Shape::kWidth + Shape::kVWidth));
}

template <typename Shape>
size_t backward_bytes(const BackwardParams& p, const LaunchArgs& launch) {
  Arena arena(nullptr);
  BackwardArguments a{};
  lay_out(arena, BackwardSizes<Shape>(p, launch), a);
  return arena.bytes();
}

template <typename Element, int kWidth, int kVWidth>
void launch_backward(const BackwardParams& p, const LaunchArgs& launch, void* workspace,
                     bool deterministic) {
  using Shape = BackwardShape<Element, kWidth, kVWidth>;
  constexpr int kM = Shape::kM, kN = Shape::kN;
  const BackwardSizes<Shape> sizes(p, launch);
  Arena arena(workspace);
  BackwardArguments a{};
  a.params = p;
  a.varlen = launch.varlen;
  a.dropout = dropout_of(p, launch);
  a.score = score_scale_of(p);
  a.row_tiles = static_cast<int>(sizes.row_tiles);
  a.row_programs = static_cast<int>(grid(sizes.row_programs));
  if (sizes.key_programs > 0) {
    a.order = backward_order(p, p.B, sizes.key_blocks, launch.max_seqlen_q);
    a.by_sharing = Divisor(p.H_q / p.H_kv);
    a.by_splits = Divisor(sizes.splits);
  }
  lay_out(arena, sizes, a);
  // Without queries nothing is added to dq, and no preprocess kernel clears the counter.
  if (!deterministic || sizes.row_tiles == 0) a.dq_semaphore = nullptr;
  a.q = tensor_map_of<Element>(p.q, p.B, p.H_q, p.M, p.D, kM);
  a.d_o = tensor_map_of<Element>(p.d_o, p.B, p.H_q, p.M, p.D_v, kM);
  a.k = tensor_map_of<Element>(p.k, p.B, p.H_kv, p.N, p.D, kN);
  a.v = tensor_map_of<Element>(p.v, p.B, p.H_kv, p.N, p.D_v, kN);
  a.dk = tensor_map_of<Element>(p.dk, p.B, p.H_kv, p.N, p.D, kWarpgroupRows);
  a.dv = tensor_map_of<Element>(p.dv, p.B, p.H_kv, p.N, p.D_v, kWarpgroupRows);

  if (sizes.row_programs > 0) {
    TK_LAUNCH((sm90::backward_preprocess_kernel<Element, kM, Shape::kDqParts, Shape::kDqElements,
                                                kVWidth>),
              grid(sizes.row_programs), preprocess_threads(kM, 2 * kVWidth), 0, launch.stream, a);
  }
  const int64_t ctas = sizes.key_programs * sizes.splits;
  if (ctas > 0 && a.dropout.seed) {
    TK_LAUNCH((sm90::dropout_backward_kernel<Element, kWidth, kVWidth>), grid(ctas),
              Shape::kTile.threads(), Shape::kBytes, launch.stream, a);
  } else if (ctas > 0) {
    TK_LAUNCH((sm90::backward_kernel<Element, kWidth, kVWidth>), grid(ctas), Shape::kTile.threads(),
              Shape::kBytes, launch.stream, a);
  }
  const int64_t shared_blocks = sizes.splits > 1 ? sizes.key_programs : 0;
  if (sizes.row_programs + shared_blocks > 0) {
    TK_LAUNCH((sm90::backward_postprocess_kernel<Element, kWidth, kVWidth>),
              grid(sizes.row_programs + shared_blocks), Shape::kDqParts * kWarp, 0, launch.stream,
              a);
  }
}

template <typename Element, int kWidth, int kVWidth>
const Kernels& kernels() {
  static constexpr Kernels kAll{kForwardWorkspaceBytes, &launch_forward<Element, kWidth, kVWidth>,
                                &backward_bytes<BackwardShape<Element, kWidth, kVWidth>>,
                                &launch_backward<Element, kWidth, kVWidth>};
  return kAll;
}

}  // namespace tk::cuda::sm90
