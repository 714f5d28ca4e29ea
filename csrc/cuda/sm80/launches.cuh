// Kernel launches for one element type, width and kind of products.
#pragma once

#include <algorithm>

#include "cuda/common/arena.h"
#include "cuda/common/launch_config.cuh"
#include "cuda/sm80/bias_gradient.cuh"
#include "cuda/sm80/decode_launches.cuh"
#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/kernels.h"
#include "cuda/sm80/loaded_arch.cuh"
#include "cuda/sm80/relative_backward.cuh"

namespace tk::cuda {

template <typename Element, int kWidth, Products kProducts>
void launch_forward(const ForwardParams& p, const LaunchArgs& launch) {
  constexpr int kBytes = sizeof(Element);
  const ForwardTile tile =
      forward_tile(kProducts, arch_of<Element, kWidth, kProducts>(), kBytes, kWidth);
  const bool is_relative = kProducts == Products::kRelative;
  const int64_t blocks = tiles_of(p.M, tile.block_m, launch.varlen);
  const int64_t programs = blocks * p.H_q * p.B;
  if (programs == 0) return;
  const Arguments<ForwardParams> a{p, launch.varlen, dropout_of(p, launch), score_scale_of(p),
                                   static_cast<int>(blocks)};
  TK_LAUNCH((forward_kernel<Element, kWidth, kProducts>), grid(programs), tile.threads(),
            is_relative ? tile.relative_bytes(kBytes, kWidth) : tile.bytes(kBytes, kWidth),
            launch.stream, a);
}

// A table by distance whose gradient is wanted: its bands of tiles, and the groups of sequences and
// heads. No bands if the gradient is not wanted.
struct DistanceSizes {
  int64_t tables, bands, groups;

  DistanceSizes(const BackwardParams& p, const LaunchArgs& launch, const BackwardTile& tile,
                bool is_wanted, bool is_shared, int min_ctas) {
    tables = is_shared ? 1 : p.H_q;
    bands = is_wanted ? ceil_of(p.score.distances, tile.block_m) : 0;
    const int64_t strips = sequences(p, launch) * (is_shared ? p.H_q : 1);
    const int64_t tiles = strips * std::min(ceil_of(launch.max_seqlen_k, tile.block_n),
                                            ceil_of(launch.max_seqlen_q, tile.block_n));
    groups = std::min(ceil_of(min_ctas, std::max<int64_t>(tables * bands, 1)),
                      std::max<int64_t>(ceil_of(tiles, kMinRelativeTiles), 1));
  }

  int64_t ctas() const { return groups * tables * bands; }
};

template <typename Element, int kWidth, Products kProducts>
struct BackwardSizes {
  BackwardTile tile;
  int64_t row_blocks, key_blocks;  // of the longest sequence
  int64_t row_tiles, query_tiles;  // of a head, and of all
  int64_t rows;
  DistanceSizes bias, keys;

  BackwardSizes(const BackwardParams& p, const LaunchArgs& launch)
      : tile(backward_tile(kProducts, arch_of<Element, kWidth, kProducts>(), sizeof(Element),
                           kWidth)),
        bias(p, launch, tile, p.drelative_bias, p.score.relative_stride == 0, kMinRelativeCtas),
        keys(p, launch, tile, p.drelative_keys, p.score.relative_keys_stride == 0,
             kMinRelativeKeysCtas) {
    row_blocks = ceil_of(launch.max_seqlen_q, tile.block_m);
    key_blocks = ceil_of(launch.max_seqlen_k, tile.block_n);
    row_tiles = tiles_of(p.M, tile.block_m, launch.varlen);
    query_tiles = row_tiles * p.H_q * p.B;
    rows = p.B * p.H_q * p.lse_stride;
  }

  // Shared memory of the bias gradient, and of a relative bias.
  int bias_bytes() const {
    return kProducts == Products::kRelative ? keys_bytes()
                                            : tile.bias_bytes(sizeof(Element), kWidth);
  }
  int relative_bytes() const {
    return kProducts == Products::kRelative ? keys_bytes()
                                            : tile.relative_bytes(sizeof(Element), kWidth);
  }
  int keys_bytes() const { return tile.relative_keys_bytes(sizeof(Element), kWidth); }
};

// The arrays that gradients of biases need.
template <typename Sizes>
void lay_out_bias_gradients(Arena& arena, const Sizes& sizes, BackwardArguments& a) {
  a.lse = arena.take<float>(sizes.rows);
  a.delta = arena.take<float>(sizes.rows);
  a.distance_sums = arena.take<float>(sizes.bias.ctas() * sizes.tile.band_distances());
}

template <typename Element, int kWidth>
void lay_out(Arena& arena, const BackwardSizes<Element, kWidth, Products::kPlain>& sizes,
             BackwardArguments& a) {
  a.dq_sums = arena.take<float>(sizes.query_tiles * sizes.tile.block_m * kWidth);
  a.dq_semaphore = arena.take<int>(sizes.query_tiles);
  a.block_counter = arena.take<int>(1);
  lay_out_bias_gradients(arena, sizes, a);
}

// Relative keys: the sums of drelative_keys by band, (CTAs, band_distances, kWidth), come last.
template <typename Element, int kWidth>
float* lay_out(Arena& arena, const BackwardSizes<Element, kWidth, Products::kRelative>& sizes,
               BackwardArguments& a) {
  lay_out_bias_gradients(arena, sizes, a);
  return arena.take<float>(sizes.keys.ctas() * sizes.tile.band_distances() * kWidth);
}

template <typename Element, int kWidth, Products kProducts>
size_t backward_bytes(const BackwardParams& p, const LaunchArgs& launch) {
  Arena arena(nullptr);
  BackwardArguments a{};
  lay_out(arena, BackwardSizes<Element, kWidth, kProducts>(p, launch), a);
  return arena.bytes();
}

inline BackwardArguments backward_arguments(const BackwardParams& p, const LaunchArgs& launch) {
  BackwardArguments a{};
  a.params = p;
  a.varlen = launch.varlen;
  a.dropout = dropout_of(p, launch);
  a.score = score_scale_of(p);
  return a;
}

template <typename Element, int kWidth, Products kProducts>
void launch_backward_preprocess(BackwardArguments a,
                                const BackwardSizes<Element, kWidth, kProducts>& sizes,
                                const LaunchArgs& launch) {
  if (sizes.query_tiles == 0) return;
  a.row_tiles = static_cast<int>(sizes.row_tiles);
  TK_LAUNCH((backward_preprocess_kernel<Element, kWidth, kProducts>), grid(sizes.query_tiles),
            preprocess_threads(sizes.tile.block_m, kWidth * sizeof(Element)), 0, launch.stream, a);
}

// Launches the bias gradient kernel. The preprocess kernel must have run before.
template <typename Element, int kWidth, Products kProducts>
void launch_bias_gradient(const BackwardArguments& backward,
                          const BackwardSizes<Element, kWidth, kProducts>& sizes,
                          const LaunchArgs& launch) {
  const BackwardParams& p = backward.params;
  BiasGradientArguments a{backward, static_cast<int>(p.bias_size[0]),
                          static_cast<int>(p.bias_size[1]), static_cast<int>(p.bias_size[2])};
  const int64_t bias_heads = p.bias_size[0] * p.bias_size[1];
  if (bias_heads * p.bias_size[2] * p.bias_size[3] == 0) return;
  if (p.bias_size[3] == 1 && p.N != 1) {
    TK_LAUNCH(bias_column_kernel, grid(bias_heads * p.bias_size[2]), kColumnThreads,
              kColumnThreads / kWarp * sizeof(float), launch.stream, a);
    return;
  }
  a.blocks = static_cast<int>(sizes.key_blocks);
  const int64_t row_blocks = p.bias_size[2] == 1 ? 1 : sizes.row_blocks;
  TK_LAUNCH((bias_gradient_kernel<Element, kWidth, kProducts>),
            grid(bias_heads * row_blocks * sizes.key_blocks), sizes.tile.threads(),
            sizes.bias_bytes(), launch.stream, a);
}

inline RelativeGradientArguments relative_gradient_arguments(const BackwardArguments& backward,
                                                             const BackwardTile& tile,
                                                             const DistanceSizes& sizes,
                                                             const LaunchArgs& launch) {
  RelativeGradientArguments a{backward,
                              tile.block_m,
                              tile.block_n,
                              tile.band_distances(),
                              static_cast<int>(sizes.tables),
                              static_cast<int>(sizes.groups),
                              static_cast<int>(sequences(backward.params, launch))};
  a.blocks = static_cast<int>(sizes.bands);
  return a;
}

// Launches the kernels of the relative bias. The preprocess kernel must have run before.
template <typename Element, int kWidth, Products kProducts>
void launch_relative_gradient(const BackwardArguments& backward,
                              const BackwardSizes<Element, kWidth, kProducts>& sizes,
                              const LaunchArgs& launch) {
  const int64_t distances = sizes.bias.tables * backward.params.score.distances;
  if (distances == 0) return;
  const auto a = relative_gradient_arguments(backward, sizes.tile, sizes.bias, launch);
  TK_LAUNCH((relative_gradient_kernel<Element, kWidth, kProducts>), grid(sizes.bias.ctas()),
            sizes.tile.threads(), sizes.relative_bytes(), launch.stream, a);
  TK_LAUNCH(relative_sum_kernel, grid(ceil_of(distances, kRelativeSumThreads)), kRelativeSumThreads,
            0, launch.stream, a);
}

template <typename Element, int kWidth, Products kProducts>
void launch_bias_gradients(const BackwardArguments& a,
                           const BackwardSizes<Element, kWidth, kProducts>& sizes,
                           const LaunchArgs& launch) {
  if (a.params.dbias.data) launch_bias_gradient(a, sizes, launch);
  if (a.params.drelative_bias) launch_relative_gradient(a, sizes, launch);
}

template <typename Element, int kWidth>
void launch_backward(const BackwardParams& p, const LaunchArgs& launch, void* workspace,
                     bool deterministic) {
  const BackwardSizes<Element, kWidth, Products::kPlain> sizes(p, launch);
  Arena arena(workspace);
  BackwardArguments a = backward_arguments(p, launch);
  lay_out(arena, sizes, a);
  // Without queries nothing is added to dq, and no preprocess kernel clears the counter.
  if (!deterministic || sizes.query_tiles == 0) a.dq_semaphore = nullptr;

  launch_backward_preprocess(a, sizes, launch);
  a.row_tiles = static_cast<int>(sizes.row_tiles);
  const int64_t key_blocks = tiles_of(p.N, sizes.tile.block_n, launch.varlen);
  if (key_blocks * p.H_kv * p.B > 0) {
    a.order = backward_order(p, p.B, key_blocks, launch.max_seqlen_q);
    a.by_sharing = Divisor(p.H_q / p.H_kv);
    TK_LAUNCH((backward_kernel<Element, kWidth>), grid(key_blocks * p.H_kv * p.B),
              sizes.tile.threads(), sizes.tile.bytes(sizeof(Element), kWidth), launch.stream, a);
  }
  if (sizes.query_tiles > 0) {
    TK_LAUNCH((dq_postprocess_kernel<Element, kWidth>), grid(sizes.query_tiles),
              sizes.tile.threads(), 0, launch.stream, a);
  }
  launch_bias_gradients(a, sizes, launch);
}

template <typename Element, int kWidth>
size_t bias_gradients_bytes(const BackwardParams& p, const LaunchArgs& launch) {
  Arena arena(nullptr);
  BackwardArguments a{};
  lay_out_bias_gradients(arena, BackwardSizes<Element, kWidth, Products::kPlain>(p, launch), a);
  return arena.bytes();
}

template <typename Element, int kWidth>
void launch_bias_gradients_alone(const BackwardParams& p, const LaunchArgs& launch,
                                 void* workspace) {
  const BackwardSizes<Element, kWidth, Products::kPlain> sizes(p, launch);
  Arena arena(workspace);
  BackwardArguments a = backward_arguments(p, launch);
  lay_out_bias_gradients(arena, sizes, a);
  launch_backward_preprocess(a, sizes, launch);
  launch_bias_gradients(a, sizes, launch);
}

// Launches the kernels of drelative_keys, with their sums in a.distance_sums.
template <typename Element, int kWidth>
void launch_relative_keys_gradient(const BackwardArguments& backward,
                                   const BackwardSizes<Element, kWidth, Products::kRelative>& sizes,
                                   const LaunchArgs& launch) {
  const BackwardParams& p = backward.params;
  const int64_t elements = sizes.keys.tables * p.score.distances * p.D;
  if (elements == 0) return;
  const auto a = relative_gradient_arguments(backward, sizes.tile, sizes.keys, launch);
  TK_LAUNCH((relative_keys_gradient_kernel<Element, kWidth>), grid(sizes.keys.ctas()),
            sizes.tile.threads(), sizes.keys_bytes(), launch.stream, a);
  TK_LAUNCH((relative_keys_sum_kernel<Element, kWidth>),
            grid(ceil_of(elements, kRelativeSumThreads)), kRelativeSumThreads, 0, launch.stream, a);
}

template <typename Element, int kWidth>
void launch_relative_backward(const BackwardParams& p, const LaunchArgs& launch, void* workspace,
                              bool /*deterministic*/) {
  const BackwardSizes<Element, kWidth, Products::kRelative> sizes(p, launch);
  const int64_t B = sequences(p, launch);
  Arena arena(workspace);
  BackwardArguments a = backward_arguments(p, launch);
  float* const key_sums = lay_out(arena, sizes, a);
  launch_backward_preprocess(a, sizes, launch);
  if (sizes.key_blocks * p.H_kv * B > 0) {
    a.blocks = static_cast<int>(sizes.key_blocks);
    TK_LAUNCH((relative_dkdv_kernel<Element, kWidth>), grid(sizes.key_blocks * p.H_kv * B),
              sizes.tile.threads(), sizes.keys_bytes(), launch.stream, a);
  }
  if (sizes.row_blocks * p.H_q * B > 0) {
    a.blocks = static_cast<int>(sizes.row_blocks);
    TK_LAUNCH((relative_dq_kernel<Element, kWidth>), grid(sizes.row_blocks * p.H_q * B),
              sizes.tile.threads(), sizes.keys_bytes(), launch.stream, a);
  }
  launch_bias_gradients(a, sizes, launch);
  a.distance_sums = key_sums;
  if (p.drelative_keys) launch_relative_keys_gradient(a, sizes, launch);
}

template <typename Element, int kWidth, Products kProducts>
const Kernels& kernels() {
  constexpr auto kForward = &launch_forward<Element, kWidth, kProducts>;
  constexpr auto kBytes = &backward_bytes<Element, kWidth, kProducts>;
  if constexpr (kProducts == Products::kRelative) {
    static constexpr Kernels kRelative{
        kForward, kBytes, &launch_relative_backward<Element, kWidth>, nullptr, nullptr,
        nullptr,  nullptr};
    return kRelative;
  } else {
    static constexpr Kernels kAll{kForward,
                                  kBytes,
                                  &launch_backward<Element, kWidth>,
                                  &bias_gradients_bytes<Element, kWidth>,
                                  &launch_bias_gradients_alone<Element, kWidth>,
                                  &decode_bytes<Element, kWidth>,
                                  &launch_decode<Element, kWidth>};
    return kAll;
  }
}

}  // namespace tk::cuda
