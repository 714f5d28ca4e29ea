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

struct DecodeSizes {
  DecodeTile tile;
  int warps_m = 1, row_tiles, units, blocks, bytes;

  DecodeSizes(const Problem& p, DecodeTile its_tile, int element_bytes, int width)
      : tile(its_tile) {
    const int64_t rows = p.H_q / p.H_kv * p.M;
    while (warps_m < tile.warps && warps_m * DecodeTile::kQueries < rows) warps_m *= 2;
    row_tiles = static_cast<int>(ceil_of(rows, warps_m * DecodeTile::kQueries));
    units = static_cast<int>(p.H_kv) * row_tiles;
    bytes = tile.bytes(element_bytes, width, warps_m);
    // The number of CTAs that are resident at once. It affects speed, not results.
    const Multiprocessors all = multiprocessors();
    constexpr int kReserved = 1024;  // bytes of shared memory per CTA reserved by the system
    const int most = std::clamp(all.shared_bytes / (bytes + kReserved), 1, tile.blocks);
    blocks = aimed_ctas(all.count * most);
  }
};

template <typename Element, int kWidth>
DecodeSizes decode_sizes(const Problem& p) {
  const int element_bytes = sizeof(Element);
  return {p, decode_tile(arch_of<Element, kWidth>(), element_bytes, kWidth), element_bytes, kWidth};
}

inline void lay_out(Arena& arena, const DecodeSizes& sizes, int64_t B, int width,
                    DecodeArguments& a) {
  const int64_t rows = int64_t{2} * sizes.blocks * sizes.warps_m * DecodeTile::kQueries;
  a.o = arena.take<float>(rows * width);
  a.m = arena.take<float>(rows);
  a.l = arena.take<float>(rows);
  a.owners = arena.take<DecodeOwners>(B * sizes.units);
}

template <typename Element, int kWidth>
size_t decode_bytes(const ForwardParams& p) {
  Arena arena(nullptr);
  DecodeArguments a{};
  lay_out(arena, decode_sizes<Element, kWidth>(p), p.B, kWidth, a);
  return arena.bytes();
}

// A diagonal, clamped such that its sum with a length fits an int.
inline int near_diagonal(int64_t x) {
  return static_cast<int>(std::clamp<int64_t>(x, -INT_MAX, kMaxIndex - 1));
}

// Arguments without the workspace.
inline DecodeArguments decode_arguments(const ForwardParams& p, const KVCache& cache,
                                        const DecodeSizes& sizes) {
  if (p.N >= kMaxIndex) throw std::runtime_error("the cache has a capacity of 2^30 keys or more");
  const int64_t units = p.B * sizes.units;
  if (units * std::max<int64_t>(1, ceil_of(p.N, sizes.tile.block_n)) > kMaxIndex) {
    throw std::runtime_error("the cache has a capacity of more than 2^30 tiles of keys");
  }
  DecodeArguments a{};
  a.params = p;
  a.cache = cache;
  a.score = score_scale_of(p);
  a.warps_m = sizes.warps_m;
  a.warps_n = sizes.tile.warps / sizes.warps_m;
  a.row_tiles = sizes.row_tiles;
  a.group = static_cast<int>(p.H_q / p.H_kv);
  a.units = sizes.units;
  a.blocks = sizes.blocks;
  const int64_t shift = cache.bottom_right ? p.M : 0;
  a.low = near_diagonal(p.mask.diagonal_low - shift);
  a.high = near_diagonal(p.mask.diagonal_high - shift);
  const int total = static_cast<int>(units), runs = std::min(total, sizes.blocks);
  a.unit_runs = {total, runs, total / runs, total % runs};
  a.by_M = Divisor(p.M);
  a.by_H_q = Divisor(p.H_q);
  a.by_group = Divisor(a.group);
  a.by_rows = Divisor(sizes.warps_m * DecodeTile::kQueries);
  a.by_row_tiles = Divisor(a.row_tiles);
  a.by_page_size = Divisor(std::max<int64_t>(1, cache.page_size));
  return a;
}

template <typename Element, int kWidth>
void launch_decode(const ForwardParams& p, const KVCache& cache, void* workspace, void* stream) {
  if (p.B * p.H_q * p.M == 0) return;
  const DecodeSizes sizes = decode_sizes<Element, kWidth>(p);
  DecodeArguments a = decode_arguments(p, cache, sizes);
  Arena arena(workspace);
  lay_out(arena, sizes, p.B, kWidth, a);
  TK_LAUNCH((decode_kernel<Element, kWidth>), grid(sizes.blocks), sizes.tile.threads(), sizes.bytes,
            stream, a);
  TK_LAUNCH((decode_combine_kernel<Element, kWidth>), grid(p.B * p.H_q * p.M),
            kCombineWarps * kWarp, kCombineWarps * (kWidth + 1) * sizeof(float), stream, a);
}

}  // namespace tk::cuda
