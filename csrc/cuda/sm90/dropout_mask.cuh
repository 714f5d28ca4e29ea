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

// Mask bits of kN keys x kM queries. One byte covers one query and the keys 8 t + r of a group of
// 64, for one r and t = 0 .. 7. Bytes are ordered by key group, r and query, with the queries in
// the order in which the lanes of an accumulator hold them.
template <int kN, int kM>
struct DropoutBitsTile {
  static constexpr int kBytes = kN * kM / 8;
  unsigned char* data;

  TK_DEVICE_METHOD unsigned char* at(int key_group, int r, int query) const {
    const int lane = query % 8 / 2;
    return data + (key_group * 8 + r) * kM + lane * (kM / 4) + query / 8 * 2 + query % 2;
  }
};

// Mask bits of one lane's elements of a warp's accumulator, 16 keys x 8 kN queries.
template <int kN>
struct DropoutBits {
  uint32_t bits[(kN + 7) / 8] = {};

  TK_DEVICE_METHOD bool operator()(int n, int e) const {
    const int byte = 2 * n + e % 2, word = byte / 4;
    return (bits[word / 4] >> (byte % 4 * 8 + word % 4 * 2 + e / 2) & 1) != 0;
  }
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
        pipeline.tile(state).at(key_group, lane / 4, query + lane % 4 * 2));
    DropoutBits<kN> keep;
#pragma unroll
    for (int word = 0; word < kN / 2; ++word) {
      keep.bits[word / 4] |= (from[word] >> 2 * warp_in_warpgroup() & 0x03030303u) << word % 4 * 2;
    }
    pipeline.release(state);
    state.next();
    return keep;
  }

  // Called by warps 1 to 3 of the CTA.
  TK_DEVICE_METHOD void generate(const BackwardArguments& a, const Shape& shared,
                                 const KeyBlock& key_block) {
    constexpr int kM = Shape::kM, kThreads = kDropoutWarps * kWarp;
    const typename Shape::KPipeline::State kv_state;
    typename Shape::RowStatsPipeline::State stats_state;
    shared.k.wait_full(kv_state);
    bool last = shared.k.tile_info(kv_state).last();
    while (!last) {
      shared.row_stats.wait_full(stats_state);
      const TileInfo info = shared.row_stats.tile_info(stats_state);
      release(shared.row_stats, stats_state);
      last = info.last();
      DropoutNumbers numbers(a.dropout, key_block.b, info.h);
      numbers.keep_keys();
      pipeline.wait_empty(state);
#pragma unroll 1
      for (int n = static_cast<int>(threadIdx.x) - kWarp; n < Shape::kN / 8 * kM; n += kThreads) {
        const int r = n % 8, query = n / 8 % kM, key_group = n / 8 / kM;
        const int counter = (key_block.n * (Shape::kN / 64) + key_group) * 8 + r;
        *pipeline.tile(state).at(key_group, r, query) = static_cast<unsigned char>(
            numbers.kept(numbers.words(counter, info.index * kM + query)));
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

  struct All {};

  TK_DEVICE_METHOD explicit NoDropoutMask(unsigned char*) {}
  TK_DEVICE_METHOD void init() const {}
  template <int>
  TK_DEVICE_METHOD All next(int, int) {
    return {};
  }
  TK_DEVICE_METHOD void generate(const BackwardArguments&, const Shape&, const KeyBlock&) {}
};

}  // namespace tk::cuda::sm90
