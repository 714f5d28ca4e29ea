// How much of a problem a thread block takes: every tile, with its reason. Plain C++.
//
// M x N are queries x keys. Shared memory decides: 163 KiB a block on compute capability 8.0 and
// 8.7, 227 on 9.0 and 10.x, but 99 on 8.6, 8.9 and 12.x. So there are two sets, and code compiled
// for 8.0 has the large one, for 8.6 the small one.
#pragma once

namespace tk::cuda {

constexpr int kWarp = 32;
constexpr int kLargeArch = 800;
constexpr int kWidths[] = {32, 64, 96, 128, 192, 256};

// The smallest tile width that holds rows of so many elements; 0 if none does.
constexpr int width_for(int columns) {
  for (const int width : kWidths) {
    if (columns <= width) return width;
  }
  return 0;
}

struct ForwardTile {
  int block_m, block_n, warps;

  constexpr int threads() const { return warps * kWarp; }
  // q, k and v
  constexpr int bytes(int element_bytes, int width) const {
    return (block_m + 2 * block_n) * width * element_bytes;
  }
};

// A warp owns block_m / warps rows of scores and of o. Its registers hold both, in float32: with 32
// rows and 64 keys 64 of them for scores and `width` for o, out of 255.
constexpr ForwardTile forward_tile(int arch, int element_bytes, int width) {
  const bool large = arch == kLargeArch;
  if (element_bytes == 4) {
    // Twice the bytes, and three parts to each operand: 16 rows a warp.
    if (width <= 96) return {64, 64, 4};
    if (width <= 192) return {64, 32, 4};
    return large ? ForwardTile{64, 32, 4} : ForwardTile{32, 32, 2};
  }
  if (width <= 128) return {128, 64, 4};  // 64 KiB at most: two blocks share a multiprocessor
  if (large) return {128, 64, 8};         // o of 32 rows would take all registers
  return {64, 64, 4};                     // 96 KiB at width 256
}

// A tile of scores is split over warps_m x (warps / warps_m) warps, the gradients of keys over
// warps_n x (warps / warps_n), those of queries over warps_q x (warps / warps_q). Every part has a
// multiple of 16 rows and columns; the squarer it is, the less is read from shared memory.
struct BackwardTile {
  int block_m, block_n, warps, warps_m, warps_n, warps_q, stages;

  constexpr int threads() const { return warps * kWarp; }
  // k and v; `stages` of q and do; p and ds
  constexpr int bytes(int element_bytes, int width) const {
    return (2 * block_n * width + 2 * stages * block_m * width + 2 * block_m * block_n) *
           element_bytes;
  }
};

// dk and dv stay in registers all the way: 2 * block_n * width numbers, over all threads.
constexpr BackwardTile backward_tile(int arch, int element_bytes, int width) {
  const bool large = arch == kLargeArch;
  if (element_bytes == 4) {
    if (width <= 32) return {64, 64, 4, 2, 2, 2, 1};
    if (width <= 96) return {32, 64, 4, 2, 2, 2, 1};
    if (width <= 128 && large) return {32, 64, 8, 2, 4, 2, 1};
    if (width <= 128 || large) return {32, 32, 4, 2, 2, 2, 1};  // 136 KiB at width 256
    if (width <= 192) return {16, 32, 2, 1, 2, 1, 1};
    return {16, 16, 1, 1, 1, 1, 1};  // 66 KiB; registers go to memory
  }
  if (width <= 32) return {64, 128, 8, 2, 4, 4, 2};
  if (width <= 64) return {64, 128, 8, 2, 4, 2, 2};  // 96 KiB
  if (large) {
    if (width <= 96) return {64, 128, 8, 2, 4, 4, 2};
    if (width <= 128) return {64, 128, 8, 2, 4, 2, 2};  // 160 KiB
    return {64, 64, 8, 2, 2, 2, 1};                     // 144 KiB at width 256
  }
  if (width <= 96) return {64, 64, 8, 2, 4, 4, 1};
  if (width <= 128) return {64, 64, 8, 2, 2, 2, 1};  // 80 KiB
  if (width <= 192) return {32, 64, 8, 2, 2, 2, 1};
  return {32, 32, 4, 2, 2, 2, 1};
}

// A block of decoding takes block_n keys at a time, of which each warp has 16, or more where
// queries take several warps; two tiles of keys and two of values are there or on their way. What
// counts is that bytes are on their way all the time: `blocks` share a multiprocessor at least, two
// of 64 KiB with 32 to 48 KiB each to come, or three of half that; or one of 128 KiB has it to
// itself.
struct DecodeTile {
  static constexpr int kQueries = 16;  // of a warp: what one instruction multiplies
  int block_n, warps, blocks;

  constexpr int threads() const { return warps * kWarp; }
  // 16 `warps_m` queries, and the four tiles
  constexpr int bytes(int element_bytes, int width, int warps_m) const {
    return (kQueries * warps_m + 4 * block_n) * width * element_bytes;
  }
};

constexpr DecodeTile decode_tile(int arch, int element_bytes, int width) {
  const bool large = arch == kLargeArch;
  const int row = width * element_bytes;
  if (row <= 128) return {64, 4, 3};  // with four registers would not suffice
  if (row <= 256) return {64, 4, 2};
  if (row <= 512) return large ? DecodeTile{64, 4, 1} : DecodeTile{32, 2, 1};
  return large ? DecodeTile{32, 2, 1} : DecodeTile{16, 1, 1};  // 80 KiB at most with its queries
}

// The least that a block has to do: to begin, and to merge what it leaves, takes as long as about
// two tiles.
constexpr int kLeastDecodeTiles = 4;

}  // namespace tk::cuda
