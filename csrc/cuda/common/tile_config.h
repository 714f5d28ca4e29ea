// Tile sizes of every CUDA kernel, each with its reason. Plain C++.
//
// M x N are queries x keys. The limit is shared memory per CTA: 163 KiB on compute capability 8.0
// and 8.7, 227 KiB on 9.0 and 10.x, but 99 KiB on 8.6, 8.9 and 12.x. So there are two sets of
// tiles. Code compiled for 8.0 uses the large set, code compiled for 8.6 the small set.
//
// building/tile_config.py parses the widths and kLargeSharedChips; _C exports them.
//
// benchmarks/tuning compiles the unit of one width with another row, such as
// -DTK_SM90_FORWARD={2,128,3,1,40,232}.
#pragma once

#include <cstdint>

namespace tk::cuda {

constexpr int kWarp = 32;
constexpr int kLargeArch = 800;

// Chips with at least 163 KiB of shared memory per CTA; 80 is compute capability 8.0. All other
// known chips have 99 KiB.
constexpr int kLargeSharedChips[] = {80, 87, 90, 100, 101, 103, 110};

// Row widths of tiles. D and D_v are padded to the next one.
constexpr int kWidths[] = {32, 64, 96, 128, 192, 256};

// Those of the kernels with relative keys: fewer, because each takes as long to compile.
constexpr int kRelativeWidths[] = {64, 128, 256};

// Those of the kernels of linear attention.
constexpr int kLinearWidths[] = {64, 128, 256};

// Row widths of the Hopper tiles: of q and k, and of v.
struct Widths {
  int width, v_width;
};
constexpr Widths kHopperWidths[] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}};

// Score products: q k^T, or those plus the products with relative keys (sm80/relative_keys.cuh).
enum class Products { kPlain, kRelative };

// True for widths of the kernels with these products.
constexpr bool is_width_of(Products products, int width) {
  for (const int one : kRelativeWidths) {
    if (one == width) return true;
  }
  return products == Products::kPlain;
}

// Returns the smallest tile width of at least `columns`; 0 if there is none.
constexpr int width_for(Products products, int columns) {
  for (const int width : kWidths) {
    if (columns <= width && is_width_of(products, width)) return width;
  }
  return 0;
}

// A warp adds the products of 16 queries and `columns` keys at their places by distance through
// float32 scratch memory. The stride of its rows, 16 more than the keys and padded, puts elements
// of adjacent diagonals in different banks, except pairs.
constexpr int distance_stride(int columns) { return columns + 16 + 7; }
constexpr int distance_bytes(int columns) { return 16 * distance_stride(columns) * 4; }

struct ForwardTile {
  int block_m, block_n, warps;

  constexpr int threads() const { return warps * kWarp; }
  // Shared memory: q, k and v.
  constexpr int bytes(int element_bytes, int width) const {
    return (block_m + 2 * block_n) * width * element_bytes;
  }
  // With relative keys also those of block_m + block_n distances, and scratch memory.
  constexpr int relative_bytes(int element_bytes, int width) const {
    return bytes(element_bytes, width) + (block_m + block_n) * width * element_bytes +
           warps * distance_bytes(block_n);
  }
};

// A warp owns block_m / warps rows of scores and of o, both in float32 registers. With 32 rows a
// thread needs block_n registers for scores and `width` for o, of 255.
constexpr ForwardTile forward_tile(int arch, int element_bytes, int width) {
#ifdef TK_SM80_FORWARD
  return TK_SM80_FORWARD;
#endif
  const bool large = arch == kLargeArch;
  if (element_bytes == 4) {
    // Twice the bytes, and three parts per operand: 16 rows per warp.
    if (width <= 96) return {64, 64, 4};
    if (width <= 192) return {64, 32, 4};
    return large ? ForwardTile{64, 32, 4} : ForwardTile{32, 32, 2};
  }
  if (width > 32 && width <= 64) return {128, 128, 4};  // 48 KiB
  if (width <= 128) return {128, 64, 4};  // at most 64 KiB: two CTAs per multiprocessor
  if (large) return {128, 64, 8};         // o of 32 rows would need all registers
  return {64, 64, 4};                     // 96 KiB at width 256
}

// Relative keys take registers and shared memory: 16 rows per warp, and fewer keys in wide rows.
constexpr ForwardTile relative_forward_tile(int arch, int element_bytes, int width) {
  const bool large = arch == kLargeArch;
  if (element_bytes == 4) {
    if (width <= 96 || (width <= 128 && large)) return {64, 32, 4};
    if (width <= 128 || (width <= 192 && large)) return {32, 32, 2};
    if (width <= 192 || large) return {32, 16, 2};  // 117 KiB at width 256
    return {16, 16, 1};                             // 82 KiB
  }
  if (width <= 96 || (width <= 128 && large)) return {64, 64, 4};  // 102 KiB at width 128
  if (width <= 192 || large) return {64, 32, 4};                   // 98 KiB at width 192
  return {32, 32, 2};                                              // 87 KiB
}

constexpr ForwardTile forward_tile(Products products, int arch, int element_bytes, int width) {
  return products == Products::kPlain ? forward_tile(arch, element_bytes, width)
                                      : relative_forward_tile(arch, element_bytes, width);
}

// On Hopper (csrc/cuda/sm90) a CTA has one producer warpgroup and `consumers` consumer warpgroups
// of 64 rows of scores and o each. One CTA uses all shared memory of a multiprocessor, 227 KiB:
// `stages` tiles of k and of v, and a second tile of q if it fits, to load the next rows early.
struct HopperForwardTile {
  int consumers, block_n, stages, q_stages;
  int producer_registers, registers;  // per thread; 64 K for all warpgroups of a CTA

  constexpr int block_m() const { return 64 * consumers; }
  constexpr int threads() const { return 128 * (1 + consumers); }
  constexpr int tile_bytes(int width, int v_width) const {
    return 2 * (q_stages * block_m() * width + stages * block_n * (width + v_width));
  }
  // Swizzled tiles are aligned to 1024 bytes. Each has two barriers and a TileInfo: 32 bytes.
  constexpr int bytes(int width, int v_width) const {
    return 1024 + tile_bytes(width, v_width) + 32 * (q_stages + 2 * stages);
  }
};

// For rows of q and k of at most `width`. A thread holds v_width / 2 elements of o, block_n / 2
// scores, and weights in half as many registers.
constexpr HopperForwardTile hopper_forward_tile(int width) {
#ifdef TK_SM90_FORWARD
  return TK_SM90_FORWARD;
#endif
  if (width <= 64) return {3, 128, 2, 2, 32, 160};   // 113 KiB
  if (width <= 128) return {2, 128, 2, 2, 40, 232};  // 193 KiB
  if (width <= 192) return {2, 128, 2, 1, 40, 232};  // 209 KiB, with v of 128
  return {2, 64, 2, 1, 40, 232};                     // 193 KiB
}

// Two consumer warpgroups own block_n keys, and accumulate dk and dv in registers. Shared memory
// holds `stages` tiles of q and of do, and `square_tiles` tiles of weights and of ds that pass from
// one product to the next.
struct HopperBackwardTile {
  int block_m, block_n, stages, square_tiles;
  bool dq_in_shared;    // dq is staged in shared memory before it is added to its sums
  bool small_producer;  // consumers have 240 registers, so that few are left for the producer

  static constexpr int kConsumers = 2, kConsumerWarps = 4 * kConsumers;

  // Registers per thread: 3 x 168 for the three warpgroups.
  constexpr int producer_registers() const { return small_producer ? 24 : 40; }
  constexpr int registers() const { return (504 - producer_registers()) / 2; }
  constexpr int threads() const { return 128 * (1 + kConsumers); }
  // k and v, q and do; p and ds; in float32: dq, and lse and delta of the rows
  constexpr int tile_bytes(int width, int v_width) const {
    return 2 * ((block_n + stages * block_m) * (width + v_width) +
                square_tiles * block_n * block_m) +
           4 * block_m * ((dq_in_shared ? width : 0) + 2 * stages);
  }
  constexpr int bytes(int width, int v_width) const {
    return 1024 + tile_bytes(width, v_width) + 32 * (2 + 3 * stages);
  }
};

// For a width of at most 192 each warpgroup owns 64 keys: a thread holds half of their columns of
// dk and dv, block_m of s and dp, at width 192 half as many, and 32 of dq. At width 256 dk and dv
// of 64 keys would need all registers. The warpgroups then share 64 keys, and each owns half of the
// columns.
constexpr HopperBackwardTile hopper_backward_tile(int width) {
#ifdef TK_SM90_BACKWARD
  return TK_SM90_BACKWARD;
#endif
  if (width <= 64) return {128, 128, 2, 2, true, true};   // 195 KiB
  if (width <= 128) return {64, 128, 2, 2, true, true};   // 194 KiB
  if (width <= 192) return {64, 128, 2, 2, false, true};  // 194 KiB, with v of 128
  return {64, 64, 2, 4, false, false};                    // 226 KiB
}

// Preprocess kernels of the backward pass: adjacent lanes share a row and load 16 bytes of it each.
// A tile of `block_m` rows has at most kPreprocessThreads threads.
constexpr int kPreprocessThreads = 256;

constexpr int lanes_per_row(int row_bytes) {
  int lanes = 1;
  while (lanes < kWarp && 16 * lanes < row_bytes) lanes *= 2;
  return lanes;
}

constexpr int preprocess_threads(int block_m, int row_bytes) {
  const int lanes = block_m * lanes_per_row(row_bytes);
  return lanes < kPreprocessThreads ? lanes : kPreprocessThreads;
}

// A tile of scores is split over warps_m x (warps / warps_m) warps, dk and dv over
// warps_n x (warps / warps_n), dq over warps_q x (warps / warps_q). Each part has a multiple of 16
// rows and columns. Square parts read the least from shared memory.
struct BackwardTile {
  int block_m, block_n, warps, warps_m, warps_n, warps_q, stages;

  constexpr int threads() const { return warps * kWarp; }
  // Shared memory: k and v; `stages` tiles of q and do; p and ds.
  constexpr int bytes(int element_bytes, int width) const {
    return (2 * block_n * width + 2 * stages * block_m * width + 2 * block_m * block_n) *
           element_bytes;
  }

  // Gradients of biases need k, v, q and do only.
  constexpr int bias_bytes(int element_bytes, int width) const {
    return 2 * (block_m + block_n) * width * element_bytes;
  }
  // That of a relative bias also a tile of ds in float32, which replaces them. Its rows are padded,
  // so that adjacent ones start in different banks.
  constexpr int ds_stride() const { return block_n + 8; }
  constexpr int relative_bytes(int element_bytes, int width) const {
    const int operands = bias_bytes(element_bytes, width), ds = 4 * block_m * ds_stride();
    return operands > ds ? operands : ds;
  }
  // Relative keys: q and k; the keys of 2 block_m distances, or v and do; scratch memory, which ds
  // replaces, in the order of keys and of distances.
  constexpr int relative_keys_bytes(int element_bytes, int width) const {
    const int scratch = warps * distance_bytes(block_n * warps_m / warps);
    const int ds = 3 * block_m * block_n * element_bytes;
    return 4 * block_m * width * element_bytes + (scratch > ds ? scratch : ds);
  }

  // Number of distances i - j of block_m such tiles, each one row after the previous one.
  constexpr int band_distances() const { return 2 * block_m + block_n - 1; }
};

// dk and dv stay in registers: 2 * block_n * width elements over all threads.
constexpr BackwardTile backward_tile(int arch, int element_bytes, int width) {
#ifdef TK_SM80_BACKWARD
  return TK_SM80_BACKWARD;
#endif
  const bool large = arch == kLargeArch;
  if (element_bytes == 4) {
    if (width <= 32) return {64, 64, 4, 2, 2, 2, 1};
    if (width <= 96) return {32, 64, 4, 2, 2, 2, 1};
    if (width <= 128 && large) return {32, 64, 8, 2, 4, 2, 1};
    if (width <= 128 || large) return {32, 32, 4, 2, 2, 2, 1};  // 136 KiB at width 256
    if (width <= 192) return {16, 32, 2, 1, 2, 1, 1};
    return {16, 16, 1, 1, 1, 1, 1};  // 66 KiB; registers are spilled
  }
  if (width <= 32) return {64, 128, 8, 2, 4, 4, 2};
  if (large) {
    if (width <= 64) return {128, 128, 8, 4, 4, 4, 2};  // 160 KiB
    if (width <= 96) return {64, 128, 8, 2, 4, 4, 2};
    if (width <= 128) return {64, 128, 8, 2, 4, 2, 2};  // 160 KiB
    return {64, 64, 8, 2, 2, 2, 1};                     // 144 KiB at width 256
  }
  if (width <= 64) return {64, 128, 8, 2, 4, 2, 2};  // 96 KiB
  if (width <= 96) return {64, 64, 8, 2, 4, 4, 1};
  if (width <= 128) return {64, 64, 8, 2, 2, 2, 1};  // 80 KiB
  if (width <= 192) return {32, 64, 8, 2, 2, 2, 1};
  return {32, 32, 4, 2, 2, 2, 1};
}

// Relative keys: square tiles of `block` queries and keys. A thread holds at most 128 elements of
// dk and dv, or of the gradients of 2 block distances; twice that in the tiles of 16.
constexpr BackwardTile relative_backward_tile(int arch, int element_bytes, int width) {
  const bool large = arch == kLargeArch;
  const int block = element_bytes == 4 ? (width <= 128 || large ? 32 : 16)   // 64 KiB at 256
                                       : (width <= 128 || large ? 64 : 32);  // 156 KiB at 256
  const int rows = block / 16;                                               // of warps
  return {block, block, rows * (rows > 1 ? 2 : 1), rows, rows, rows, 1};
}

constexpr BackwardTile backward_tile(Products products, int arch, int element_bytes, int width) {
  return products == Products::kPlain ? backward_tile(arch, element_bytes, width)
                                      : relative_backward_tile(arch, element_bytes, width);
}

// The sequences and heads of a relative bias are divided among CTAs: at least so many in all,
// several per multiprocessor of a large GPU, if each has so many tiles. The sum of diagonals takes
// as long as a tile. The division does not depend on the device, so that the bits of the gradient
// do not.
constexpr int kMinRelativeCtas = 1024;
constexpr int kMinRelativeTiles = 4;

// The same for relative keys, whose sums take `width` times the memory.
constexpr int kMinRelativeKeysCtas = 256;

// A decode CTA processes block_n keys at a time. Each warp owns 16 of them, or more if the queries
// need several warps. Shared memory holds two tiles of keys and two of values, loaded or in flight.
// Decoding is bound by memory bandwidth, so loads must always be in flight: at least `blocks` CTAs
// share a multiprocessor. These are two of 64 KiB with 32 to 48 KiB in flight each, three of half
// that size, or one of 128 KiB.
struct DecodeTile {
  static constexpr int kQueries = 16;  // rows per warp: m of one mma instruction
  int block_n, warps, blocks;

  constexpr int threads() const { return warps * kWarp; }
  // Shared memory: 16 * warps_m queries, and four tiles of keys and values.
  constexpr int bytes(int element_bytes, int width, int warps_m) const {
    return (kQueries * warps_m + 4 * block_n) * width * element_bytes;
  }
};

constexpr DecodeTile decode_tile(int arch, int element_bytes, int width) {
  const bool large = arch == kLargeArch;
  const int row = width * element_bytes;
  if (row <= 128) return {64, 4, 3};  // four CTAs would need too many registers
  if (row <= 256) return {64, 4, 2};
  if (row <= 512) return large ? DecodeTile{64, 4, 1} : DecodeTile{32, 2, 1};
  return large ? DecodeTile{32, 2, 1} : DecodeTile{16, 1, 1};  // at most 80 KiB with the queries
}

// Minimum number of tiles per decode CTA, unless it processes whole units. Starting a CTA and
// combining its partial result takes as long as about two tiles.
constexpr int kMinDecodeTiles = 4;

// Attention without a cache runs the decode kernels, too, if a query tile holds all queries of a
// key head. Exceptions: few keys, where the launch takes most of the time and there would be two;
// and heads that share no keys, if they occupy a large GPU.
constexpr int kMinDecodeKeys = 1024;
constexpr int kManyHeads = 256;
constexpr bool decodes(int64_t B, int64_t H_q, int64_t H_kv, int64_t M, int64_t N) {
  if (N < kMinDecodeKeys || H_kv == 0 || H_q / H_kv * M > DecodeTile::kQueries) return false;
  return H_q > H_kv || B * H_q < kManyHeads;
}

// Linear attention: a CTA computes `tokens` rows and `slice` columns of a result, 16 rows per warp.
// Shared memory holds rows of a, and first `slice` columns of the state, then rows of b and `slice`
// columns of c: at most 99 KiB, so that one set of tiles serves all chips.
struct LinearTile {
  int tokens, slice;

  constexpr int warps() const { return tokens / 16; }
  constexpr int threads() const { return warps() * kWarp; }
  // Columns of a state that a CTA sums in 64 float32 registers per thread.
  constexpr int state_slice(int width) const {
    return slice * width <= 64 * threads() ? slice : 64 * threads() / width;
  }
};

// `number_bytes` is the size of an operand in shared memory: 2 for bfloat16, otherwise 4.
constexpr LinearTile linear_tile(int number_bytes, int width) {
  if (number_bytes == 2) return width <= 64 ? LinearTile{64, 64} : LinearTile{64, 128};
  if (width <= 64) return {64, 64};
  if (width <= 128) return {64, 32};
  return {32, 32};
}

// Tokens between two states in memory. Longer segments have fewer states to write and read, and
// more pairs of tokens to multiply: docs/linear.md, section 6.
constexpr int linear_segment(int width) { return 2 * width; }

}  // namespace tk::cuda
