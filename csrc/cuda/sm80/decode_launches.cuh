// Decode launches for one element type and width.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "cuda/common/arena.h"
#include "cuda/common/launch_config.cuh"
#include "cuda/sm80/decode.cuh"
#include "cuda/sm80/decode_combine.cuh"
#include "cuda/sm80/loaded_arch.cuh"

namespace tk::cuda {

template <typename Element, int kWidth>
struct DecodeSizes {
  DecodeTile tile;
  int warps_m = 1, row_tiles, blocks, bytes;

  explicit DecodeSizes(const Problem& p)
      : tile(decode_tile(arch_of<Element, kWidth>(), sizeof(Element), kWidth)) {
    const int64_t rows = p.H_q / p.H_kv * p.M;
    while (warps_m < tile.warps && warps_m * DecodeTile::kQueries < rows) warps_m *= 2;
    row_tiles = static_cast<int>(ceil_of(rows, warps_m * DecodeTile::kQueries));
    bytes = tile.bytes(sizeof(Element), kWidth, warps_m);
    // The number of CTAs that are resident at once. It affects speed, not results.
    const Multiprocessors all = multiprocessors();
    constexpr int kReserved = 1024;  // bytes of shared memory per CTA reserved by the system
    blocks = all.count * std::clamp(all.shared_bytes / (bytes + kReserved), 1, tile.blocks);
  }
};

template <typename Element, int kWidth>
void lay_out(Arena& arena, const DecodeSizes<Element, kWidth>& sizes, DecodeArguments& a) {
  const int64_t rows = int64_t{2} * sizes.blocks * sizes.warps_m * DecodeTile::kQueries;
  a.o = arena.take<float>(rows * kWidth);
  a.m = arena.take<float>(rows);
  a.l = arena.take<float>(rows);
}

template <typename Element, int kWidth>
size_t decode_bytes(const ForwardParams& p) {
  Arena arena(nullptr);
  DecodeArguments a{};
  lay_out(arena, DecodeSizes<Element, kWidth>(p), a);
  return arena.bytes();
}

template <typename Element, int kWidth>
void launch_decode(const ForwardParams& p, const KVCache& cache, void* workspace, void* stream) {
  if (p.B * p.H_q * p.M == 0) return;
  if (p.N > kMaxIndex) throw std::runtime_error("the cache has a capacity of more than 2^30 keys");
  const DecodeSizes<Element, kWidth> sizes(p);
  DecodeArguments a{};
  a.params = p;
  a.cache = cache;
  a.score = score_scale_of(p);
  a.warps_m = sizes.warps_m;
  a.row_tiles = sizes.row_tiles;
  a.block_n = sizes.tile.block_n;
  a.blocks = sizes.blocks;
  Arena arena(workspace);
  lay_out(arena, sizes, a);
  TK_LAUNCH((decode_kernel<Element, kWidth>), grid(sizes.blocks), sizes.tile.threads(), sizes.bytes,
            stream, a);
  TK_LAUNCH((decode_combine_kernel<Element, kWidth>), grid(p.B * p.H_q * p.M),
            kCombineWarps * kWarp, kCombineWarps * (kWidth + 1) * sizeof(float), stream, a);
}

}  // namespace tk::cuda
