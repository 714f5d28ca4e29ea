// Dropout mask of the backward pass. Score tiles hold keys in rows here, and the 8 random numbers
// of one Philox counter belong to keys 8 apart, so every warp of a consumer would have to generate
// each number. Instead the idle warps of the producer warpgroup generate the mask bits one tile
// ahead, in shared memory.
#pragma once

#include "cuda/common/dropout.cuh"
#include "cuda/sm90/backward_preprocess.cuh"
#include "cuda/sm90/warpgroups.cuh"

namespace tk::cuda::sm90 {

constexpr int kDropoutWarps = kWarpgroupWarps - 1;

// Mask bits of kN keys x kM queries. One byte covers one query and the 8 keys of one counter: keys
// 8 t + counter % 8, t = 0 .. 7, of a group of 64. Bytes are ordered by counter and query, with the
// queries in the order in which the lanes of an accumulator hold them: pairs are adjacent.
template <int kN, int kM>
struct DropoutBitsTile {
  static constexpr int kBytes = kN * kM / 8, kCounters = kN / 8;
  unsigned char* data;

  TK_DEVICE_METHOD unsigned char* at(int counter, int query) const {
    const unsigned n = static_cast<unsigned>(query), lane = n % 8 / 2;
    return data + counter * kM + lane * (kM / 4) + n / 8 * 2 + n % 2;
  }
};

// Mask bits of one lane's elements of a warp's accumulator, 16 keys x 8 kN queries.
template <int kN>
struct DropoutBits {
  static constexpr bool kDropsWeights = true;
  uint32_t bits[(kN + 7) / 8] = {};

  TK_DEVICE_METHOD bool operator()(int n, int e) const {
    const int byte = 2 * n + e % 2, word = byte / 4;
    return (bits[word / 4] >> (byte % 4 * 8 + word % 4 * 2 + e / 2) & 1) != 0;
  }

  // Those of the elements from 8-query tile `first` on.
  struct Tail {
    static constexpr bool kDropsWeights = true;
    const DropoutBits& all;
    const int first;

    TK_DEVICE_METHOD bool operator()(int n, int e) const { return all(first + n, e); }
  };
  TK_DEVICE_METHOD Tail from(int first) const { return {*this, first}; }
};

// Dropout mask policy: `generate` is the producer side, `next` the consumer side. Every lane
// arrives on the mbarriers itself: the race detector of compute-sanitizer does not see that one
// lane may do so for its warp after __syncwarp.
template <typename Shape>
struct DropoutMask {
  using BitsPipeline = Pipeline<DropoutBitsTile<Shape::kN, Shape::kM>, 1>;
  static constexpr bool kHasWarps = true;
  static constexpr int kProducerRegisters = Shape::kTile.producer_registers(kHasWarps),
                       kRegisters = Shape::kTile.registers(kHasWarps);
  static constexpr int kBytes = BitsPipeline::kTileBytes + BitsPipeline::kSyncBytes;
  static constexpr int kRowStatsConsumers = kDropoutWarps;

  BitsPipeline pipeline;
  typename BitsPipeline::State state;

  TK_DEVICE_METHOD explicit DropoutMask(unsigned char* shared)
      : pipeline(shared, shared + BitsPipeline::kTileBytes) {}

  TK_DEVICE_METHOD void init() const {
    pipeline.init(Shape::kConsumers * kWarpgroupThreads, kDropoutWarps * kWarp);
  }

  // Mask bits of the calling warp's 16 keys in group `key_group` of 64, and of 8 kN queries from
  // `query` on. Called by every consumer warp, once per query tile.
  template <int kN>
  TK_DEVICE_METHOD DropoutBits<kN> next(int key_group, int query) {
    pipeline.wait_full(state);
    const int lane = lane_index();
    const auto* const from = reinterpret_cast<const uint32_t*>(
        pipeline.tile(state).at(key_group * 8 + lane / 4, query + lane % 4 * 2));
    DropoutBits<kN> keep;
#pragma unroll
    for (int word = 0; word < kN / 2; ++word) {
      keep.bits[word / 4] |= (from[word] >> 2 * warp_in_warpgroup() & 0x03030303u) << word % 4 * 2;
    }
    pipeline.release(state);
    state.next();
    return keep;
  }

  // Called by warps 1 to 3 of the CTA. A lane generates the bits of two queries at a time, so that
  // the instructions of one do not wait for those of the other.
  TK_DEVICE_METHOD void generate(const BackwardArguments& a, const Shape& shared,
                                 const KeyBlock& key_block) {
    using Tile = typename BitsPipeline::Tile;
    constexpr int kM = Shape::kM, kSteps = kM / (2 * kWarp);  // per counter
    static_assert(kM % (2 * kWarp) == 0);
    const typename Shape::KPipeline::State kv_state;
    typename Shape::RowStatsPipeline::State stats_state;
    DropoutNumbers of_heads(a.dropout, key_block.b, 0);
    of_heads.broadcast_keys();
    shared.k.wait_full(kv_state);
    bool last = shared.k.tile_info(kv_state).last();
    while (!last) {
      shared.row_stats.wait_full(stats_state);
      const TileInfo info = shared.row_stats.tile_info(stats_state);
      release(shared.row_stats, stats_state);
      last = info.last();
      const DropoutNumbers numbers = of_heads.of_head(info.h);
      pipeline.wait_empty(state);
#pragma unroll 1
      for (int n = warp_index() - 1; n < Tile::kCounters * kSteps; n += kDropoutWarps) {
        const int counter = static_cast<int>(static_cast<unsigned>(n) / kSteps);
        const int query = (n - counter * kSteps) * 2 * kWarp + 2 * lane_index();
        uint32_t bits[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          bits[m] = numbers.kept(
              numbers.words(key_block.n * Tile::kCounters + counter, info.index * kM + query + m));
        }
        *reinterpret_cast<uint16_t*>(pipeline.tile(state).at(counter, query)) =
            static_cast<uint16_t>(bits[0] | bits[1] << 8);
      }
      mbarrier_arrive(pipeline.full(state));
      stats_state.next();
      state.next();
    }
  }
};

// Policy without dropout: no storage, no warps.
template <typename Shape>
struct NoDropoutMask {
  static constexpr bool kHasWarps = false;
  static constexpr int kProducerRegisters = Shape::kTile.producer_registers(kHasWarps),
                       kRegisters = Shape::kTile.registers(kHasWarps);
  static constexpr int kBytes = 0, kRowStatsConsumers = 0;

  struct All {
    static constexpr bool kDropsWeights = false;
    TK_DEVICE_METHOD All from(int) const { return {}; }
  };

  TK_DEVICE_METHOD explicit NoDropoutMask(unsigned char*) {}
  TK_DEVICE_METHOD void init() const {}
  template <int>
  TK_DEVICE_METHOD All next(int, int) {
    return {};
  }
  TK_DEVICE_METHOD void generate(const BackwardArguments&, const Shape&, const KeyBlock&) {}
};

}  // namespace tk::cuda::sm90
