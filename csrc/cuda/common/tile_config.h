// Tile sizes of every CUDA kernel, each with its reason. Plain C++.
//
// M x N are queries x keys. Shared memory decides: 163 KiB a block on compute capability 8.0 and
// 8.7, 227 on 9.0 and 10.x, but 99 on 8.6, 8.9 and 12.x. So there are two sets, and code compiled
// for 8.0 has the large one, for 8.6 the small one.
//
// building/tile_config.py parses kWidths, kHopperWidths and kLargeSharedChips; _C exports them.
#pragma once

namespace tk::cuda {

constexpr int kWarp = 32;
constexpr int kLargeArch = 800;

// Chips with 163 KiB of shared memory a block or more: 80 is compute capability 8.0. Others have
// 99, as far as is known.
constexpr int kLargeSharedChips[] = {80, 87, 90, 100, 101, 103, 110};

// Row widths of tiles: D and D_v are padded to the next one.
constexpr int kWidths[] = {32, 64, 96, 128, 192, 256};

// Row widths of Hopper's tiles: of q and k, and of v.
struct Widths {
  int width, v_width;
};
constexpr Widths kHopperWidths[] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}};

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

// On Hopper (csrc/cuda/sm90) a block has a warpgroup that loads and `consumers` that each own 64
// rows of scores and of o. All of a multiprocessor's shared memory, 227 KiB, is one block's:
// `stages` tiles of k and of v, and a second one of q where it fits, so that the next rows' are
// there early.
struct HopperForwardTile {
  int consumers, block_n, stages, q_stages;
  int producer_registers, registers;  // a thread; those of all groups make 64 K

  constexpr int block_m() const { return 64 * consumers; }
  constexpr int threads() const { return 128 * (1 + consumers); }
  constexpr int tile_bytes(int width, int v_width) const {
    return 2 * (q_stages * block_m() * width + stages * block_n * (width + v_width));
  }
  // Swizzled tiles begin at a multiple of 1024. Two barriers and a note go with each.
  constexpr int bytes(int width, int v_width) const {
    return 1024 + tile_bytes(width, v_width) + 40 * (q_stages + 2 * stages);
  }
};

// Rows of q and k of at most `width`, of v of at most `v_width`. A thread has width / 2 numbers of
// o, block_n / 2 of scores and half as many registers of weights.
constexpr HopperForwardTile hopper_forward_tile(int width) {
  if (width <= 64) return {3, 128, 2, 2, 32, 160};   // 113 KiB
  if (width <= 128) return {2, 128, 2, 2, 40, 232};  // 193 KiB
  if (width <= 192) return {2, 128, 2, 1, 40, 232};  // 209 KiB, with v of 128
  return {2, 64, 2, 1, 40, 232};                     // 193 KiB
}

// Two groups have block_n keys, and dk and dv of them; queries pass by, `stages` tiles of q and of
// do at a time. `square_tiles` are of weights and of ds, on their way from one product to another.
struct HopperBackwardTile {
  int block_m, block_n, stages, square_tiles;
  bool dq_in_shared;  // on its way to its sums
  int producer_registers, registers;

  static constexpr int kConsumers = 2;

  constexpr int threads() const { return 128 * (1 + kConsumers); }
  // k and v, q and do; squares; sums of dq and what rows bring along, in float32
  constexpr int tile_bytes(int width, int v_width) const {
    return 2 * ((block_n + stages * block_m) * (width + v_width) +
                square_tiles * block_n * block_m) +
           4 * block_m * ((dq_in_shared ? width : 0) + 2 * stages);
  }
  constexpr int bytes(int width, int v_width) const {
    return 1024 + tile_bytes(width, v_width) + 40 * (2 + 3 * stages);
  }
};

// Of rows of at most 128 each group owns 64 keys: a thread has `width` numbers of dk and dv,
// block_m of s and dp, and 32 of dq. Of longer ones dk and dv of as many would take all registers,
// so that the groups share 64 keys and each has half of the columns.
constexpr HopperBackwardTile hopper_backward_tile(int width) {
  if (width <= 64) return {128, 128, 2, 1, true, 40, 232};  // 163 KiB
  if (width <= 128) return {64, 128, 2, 1, true, 40, 232};  // 178 KiB
  return {64, 64, 2, 4, false, 40, 232};                    // 226 KiB, with v of 128 178
}

// What q, k or v is filled up to: columns are halved between groups, and come in panels of 64.
constexpr int hopper_backward_width(int width) {
  return width <= 128 ? width : (width + 127) / 128 * 128;
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
