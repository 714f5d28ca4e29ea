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
inline bool has_uneven_tiles(const ForwardParams& p, const LaunchArgs& launch) {
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
  const int64_t blocks = ceil_of(launch.max_seqlen_q, kTile.block_m());
  const int64_t heads = sequences(p, launch) * p.H_q;
  if (blocks * heads == 0) return;
  const unsigned tiles = grid(blocks * heads),
                 ctas = std::min(tiles, static_cast<unsigned>(multiprocessors().count));
  int* const taken =
      tiles > ctas && has_uneven_tiles(p, launch) ? static_cast<int*>(workspace) : nullptr;
  if (taken) TK_LAUNCH(clear_kernel, 1, kWarp, 0, launch.stream, taken);
  ForwardArguments a{
      {p, launch.varlen, dropout_of(p, launch), score_scale_of(p), static_cast<int>(blocks)},
      {heads, p.H_q, p.H_q / p.H_kv, blocks, swizzle_heads_of(p, launch.max_seqlen_k, heads),
       taken},
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
  int64_t row_tiles, key_blocks, all_tiles;

  BackwardSizes(const BackwardParams& p, const LaunchArgs& launch)
      : row_tiles(ceil_of(launch.max_seqlen_q, kM)),
        key_blocks(ceil_of(launch.max_seqlen_k, Shape::kN)) {
    all_tiles =
        p.H_q * (launch.varlen.cu_seqlens_q ? p.M / kM + launch.varlen.B : p.B * ceil_of(p.M, kM));
  }
};

// Partitions the workspace.
template <typename Shape>
void lay_out(Arena& arena, const BackwardSizes<Shape>& sizes, BackwardArguments& a) {
  a.dq_sums = arena.take<float>(sizes.all_tiles * Shape::kDqParts * Shape::kDqElements);
  a.dq_semaphore = arena.take<int>(sizes.all_tiles * Shape::kDqParts);
  a.block_counter = arena.take<int>(1);
  a.row_stats = arena.take<float>(sizes.all_tiles * RowStats<Shape::kM>::kStored);
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
  const int64_t B = sequences(p, launch);
  Arena arena(workspace);
  BackwardArguments a{};
  a.params = p;
  a.varlen = launch.varlen;
  a.dropout = dropout_of(p, launch);
  a.score = score_scale_of(p);
  a.blocks = static_cast<int>(sizes.key_blocks);
  a.row_tiles = static_cast<int>(sizes.row_tiles);
  lay_out(arena, sizes, a);
  // Without queries nothing is added to dq, and no preprocess kernel clears the counter.
  if (!deterministic || sizes.row_tiles == 0) a.dq_semaphore = nullptr;
  a.q = tensor_map_of<Element>(p.q, p.B, p.H_q, p.M, p.D, kM);
  a.d_o = tensor_map_of<Element>(p.d_o, p.B, p.H_q, p.M, p.D_v, kM);
  a.k = tensor_map_of<Element>(p.k, p.B, p.H_kv, p.N, p.D, kN);
  a.v = tensor_map_of<Element>(p.v, p.B, p.H_kv, p.N, p.D_v, kN);
  a.dk = tensor_map_of<Element>(p.dk, p.B, p.H_kv, p.N, p.D, kWarpgroupRows);
  a.dv = tensor_map_of<Element>(p.dv, p.B, p.H_kv, p.N, p.D_v, kWarpgroupRows);

  const int64_t row_programs = sizes.row_tiles * p.H_q * B;
  if (row_programs > 0) {
    TK_LAUNCH((sm90::backward_preprocess_kernel<Element, kM, Shape::kDqParts, Shape::kDqElements,
                                                kVWidth>),
              grid(row_programs), preprocess_threads(kM, 2 * kVWidth), 0, launch.stream, a);
  }
  const int64_t key_programs = sizes.key_blocks * p.H_kv * B;
  if (key_programs > 0 && a.dropout.seed) {
    TK_LAUNCH((sm90::dropout_backward_kernel<Element, kWidth, kVWidth>), grid(key_programs),
              Shape::kTile.threads(), Shape::kBytes + DropoutMask<Shape>::kBytes, launch.stream, a);
  } else if (key_programs > 0) {
    TK_LAUNCH((sm90::backward_kernel<Element, kWidth, kVWidth>), grid(key_programs),
              Shape::kTile.threads(), Shape::kBytes, launch.stream, a);
  }
  if (row_programs > 0) {
    TK_LAUNCH((sm90::dq_postprocess_kernel<Element, kWidth, kVWidth>), grid(row_programs),
              Shape::kDqParts * kWarp, 0, launch.stream, a);
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
