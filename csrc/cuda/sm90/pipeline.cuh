// Tiles that one warp fills, by TMA or by hand, and warpgroups read, a few of them in turn.
#pragma once

#include "cuda/common/shared_tile.cuh"
#include "cuda/platform/sm90_ptx.h"

namespace tk::cuda::sm90 {

// What the warp that fills a tile knows of it.
struct Note {
  int index;  // of the block of keys, or of queries
  int h;      // of q
  bool full;  // all of it is visible
  bool last;  // no block comes behind it
  // Of queries: where their gradients are summed, and how many blocks of keys are to add before.
  int tile = 0, turn = 0;
};

constexpr int kRingBytes = 2 * sizeof(uint64_t) + 24;  // two barriers and a note for each tile
static_assert(sizeof(Note) <= 24);

// Which tile of a ring a thread is at; it keeps its own.
template <int kStages>
struct Place {
  int stage = 0;
  uint32_t parity = 0;  // of the round

  TK_DEVICE_METHOD void next() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    if (stage == 0) parity ^= 1;
  }
};

template <typename Tile_, int kStages>
class Ring {
 public:
  using Tile = Tile_;
  using At = Place<kStages>;
  static constexpr int kTileBytes = kStages * Tile::kBytes;
  static constexpr int kOtherBytes = kStages * kRingBytes;

  // `tiles` begins at a multiple of 1024, `others` of 8.
  TK_DEVICE_METHOD Ring(unsigned char* tiles, unsigned char* others)
      : tiles_(tiles), barriers_(reinterpret_cast<uint64_t*>(others)) {}

  // By one thread, before others use the ring.
  TK_DEVICE_METHOD void init(int readers, int writers = 1) const {
    for (int n = 0; n < kStages; ++n) {
      mbarrier_init(barriers_ + n, static_cast<uint32_t>(writers));
      mbarrier_init(barriers_ + kStages + n, static_cast<uint32_t>(readers));
    }
  }

  TK_DEVICE_METHOD Tile tile(const At& at) const {
    return {reinterpret_cast<decltype(Tile::data)>(tiles_ + at.stage * Tile::kBytes)};
  }
  // Written before the tile is full, and then its readers'.
  TK_DEVICE_METHOD Note& note(const At& at) const {
    return reinterpret_cast<Note*>(barriers_ + 2 * kStages)[at.stage];
  }

  // Who fills: waits until the tile is read, and then arrives at `full` once.
  TK_DEVICE_METHOD void wait_empty(const At& at) const { mbarrier_wait(empty(at), at.parity ^ 1); }
  TK_DEVICE_METHOD uint64_t* full(const At& at) const { return barriers_ + at.stage; }

  // Who reads: waits until it is filled, and has one thread of each reader say when it is read.
  TK_DEVICE_METHOD void wait_full(const At& at) const { mbarrier_wait(full(at), at.parity); }
  TK_DEVICE_METHOD void release(const At& at) const { mbarrier_arrive(empty(at)); }

 private:
  TK_DEVICE_METHOD uint64_t* empty(const At& at) const { return barriers_ + kStages + at.stage; }

  unsigned char* tiles_;
  uint64_t* barriers_;
};

// Hands out what a block shares: tiles, and behind all of them what else belongs to rings.
struct SharedCursor {
  unsigned char *tiles, *others;

  template <typename Ring>
  TK_DEVICE_METHOD Ring ring() {
    const Ring ring(tiles, others);
    tiles += Ring::kTileBytes;
    others += Ring::kOtherBytes;
    return ring;
  }
  template <typename Tile>
  TK_DEVICE_METHOD Tile tile() {
    const Tile tile{reinterpret_cast<decltype(Tile::data)>(tiles)};
    tiles += Tile::kBytes;
    return tile;
  }
  TK_DEVICE_METHOD float* floats(int count) {
    float* const first = reinterpret_cast<float*>(tiles);
    tiles += count * sizeof(float);
    return first;
  }
};

// Of a ring's tile, by a warp whose lanes have all read what is not wgmma's.
template <typename Ring>
TK_DEVICE void release(const Ring& ring, const typename Ring::At& at) {
  __syncwarp();  // all lanes
  if (lane_index() == 0) ring.release(at);
}

// By one thread: rows from `row` on of a head, a panel at a time. Beyond the tensor are zeros.
template <typename Ring>
TK_DEVICE void fill(const Ring& ring, const typename Ring::At& at, const TensorMap& map, int row,
                    int head, int entry) {
  using Tile = typename Ring::Tile;
  const Tile tile = ring.tile(at);
  mbarrier_arrive_expect(ring.full(at), Tile::kBytes);
#pragma unroll
  for (int column = 0; column < Tile::kWidth; column += Tile::kPanel) {
    load_tensor(tile.at(0, column), map, ring.full(at), {column, row, head, entry});
  }
}

// Whether some of rows first .. last - 1 are not `there`. Behind a tensor, and so behind the last
// row of what is not packed, TMA brings zeros; but what lies within it may be NaN. By a warp.
template <typename There>
TK_DEVICE bool has_hidden_rows(const There& there, int first, int last) {
  bool hidden = false;
  for (int row = first + lane_index(); row < last; row += kWarp) hidden |= !there(row);
  return __any_sync(~0u, hidden) != 0;
}

// By a warp, the block's first: rows that are not `there` are zeros, and are not read.
template <typename Ring, typename Element, typename There>
TK_DEVICE void fill_by_hand(const Ring& ring, const typename Ring::At& at,
                            const Rows<const Element>& rows, int row, const There& there) {
  start_load<kWarp>(ring.tile(at), rows, row, false, there);
  wait_copies<0>();
  fence_async();
  __syncwarp();
  if (elect_one()) mbarrier_arrive(ring.full(at));
}

}  // namespace tk::cuda::sm90
