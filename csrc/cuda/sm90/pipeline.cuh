// Producer/consumer pipeline: a circular buffer of shared-memory tiles. A producer warp fills them
// by TMA or cp.async, consumer warpgroups read them. Each stage has a `full` and an `empty`
// mbarrier.
#pragma once

#include "cuda/common/shared_tile.cuh"
#include "cuda/platform/sm90_ptx.h"

namespace tk::cuda::sm90 {

// Per-tile metadata, written by the producer and read by the consumers.
struct alignas(16) TileInfo {
  int index;     // key block or query block
  int h;         // query head
  int tile = 0;  // query tiles: of row_stats and dq_sums; keys of the backward pass: see epilogue
  int flags = 0;

  TileInfo() = default;
  TK_DEVICE_METHOD TileInfo(int index, int h, bool full, bool last)
      : index(index), h(h), flags((full ? kFull : 0) | (last ? kLast : 0)) {}

  TK_DEVICE_METHOD bool full() const { return flags & kFull; }  // fully visible: no masking needed
  TK_DEVICE_METHOD bool last() const { return flags & kLast; }  // no block follows
  // Query tiles only: see RowStats; (deterministic mode) the key blocks that accumulate into dq of
  // this tile before this one.
  TK_DEVICE_METHOD bool natural_lse() const { return flags & kNaturalLse; }
  TK_DEVICE_METHOD int preceding_blocks() const { return flags >> kFlagBits; }
  // Last key block only: the first consumers whose queries do not see it.
  TK_DEVICE_METHOD int dead_strips() const { return flags >> kFlagBits; }

  TK_DEVICE_METHOD void set_last() { flags |= kLast; }
  TK_DEVICE_METHOD void set_natural_lse() { flags |= kNaturalLse; }
  TK_DEVICE_METHOD void set_preceding_blocks(int count) { flags |= count << kFlagBits; }
  TK_DEVICE_METHOD void set_dead_strips(int count) { flags |= count << kFlagBits; }

 private:
  static constexpr int kFull = 1, kLast = 2, kNaturalLse = 4, kFlagBits = 3;
};

// A copy by one load, with what all lanes use broadcast, so that the compiler knows it to be
// warp-uniform.
TK_DEVICE TileInfo uniform(const TileInfo& info) {
  const auto broadcast = [](int x) { return __shfl_sync(~0u, x, 0); };
  const int4 loaded = *reinterpret_cast<const int4*>(&info);
  TileInfo result;
  result.index = broadcast(loaded.x);
  result.h = broadcast(loaded.y);
  result.tile = loaded.z;
  result.flags = broadcast(loaded.w);
  return result;
}

constexpr int kInfoBytes = 16;
constexpr int kStageSyncBytes = 2 * sizeof(uint64_t) + kInfoBytes;  // two mbarriers

// Stage and phase parity of one thread's position in a pipeline. Every thread keeps its own.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;  // flips on each wrap-around

  TK_DEVICE_METHOD void next() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    if (stage == 0) parity ^= 1;
  }
  // Broadcasts the position, so that the compiler knows it to be warp-uniform.
  TK_DEVICE_METHOD void make_uniform() {
    stage = __shfl_sync(~0u, stage, 0);
    parity = __shfl_sync(~0u, parity, 0);
  }
};

// Every stage has metadata of type Info, at most kInfoBytes.
template <typename Tile_, int kStages, typename Info = TileInfo>
class Pipeline {
 public:
  static_assert(sizeof(Info) <= kInfoBytes && alignof(Info) <= kInfoBytes);
  using Tile = Tile_;
  using State = PipelineState<kStages>;
  static constexpr int kTileBytes = kStages * Tile::kBytes;
  static constexpr int kSyncBytes = kStages * kStageSyncBytes;

  // Alignment: 1024 bytes for `tiles`, 16 bytes for `sync`.
  TK_DEVICE_METHOD Pipeline(unsigned char* tiles, unsigned char* sync)
      : tiles_(tiles), barriers_(reinterpret_cast<uint64_t*>(sync)) {}

  // Called by one thread, before any other uses the pipeline. Arguments: arrivals per phase.
  TK_DEVICE_METHOD void init(int consumers, int producers = 1) const {
    for (int n = 0; n < kStages; ++n) {
      mbarrier_init(barriers_ + n, static_cast<uint32_t>(producers));
      mbarrier_init(barriers_ + kStages + n, static_cast<uint32_t>(consumers));
    }
  }

  TK_DEVICE_METHOD Tile tile(const State& state) const {
    return {reinterpret_cast<decltype(Tile::data)>(tiles_ + state.stage * Tile::kBytes)};
  }
  // Written by the producer before `full` completes; read-only afterwards.
  TK_DEVICE_METHOD Info& tile_info(const State& state) const {
    return reinterpret_cast<Info*>(barriers_ + 2 * kStages)[state.stage];
  }

  // Producer: waits until the stage is free, fills it, then arrives once on `full`.
  TK_DEVICE_METHOD void wait_empty(const State& state) const {
    mbarrier_wait(empty(state), state.parity ^ 1);
  }
  TK_DEVICE_METHOD uint64_t* full(const State& state) const { return barriers_ + state.stage; }

  // Consumer: waits until the stage is filled; one thread per consumer releases it after reading.
  TK_DEVICE_METHOD void wait_full(const State& state) const {
    mbarrier_wait(full(state), state.parity);
  }
  TK_DEVICE_METHOD void release(const State& state) const { mbarrier_arrive(empty(state)); }

 private:
  TK_DEVICE_METHOD uint64_t* empty(const State& state) const {
    return barriers_ + kStages + state.stage;
  }

  unsigned char* tiles_;
  uint64_t* barriers_;
};

// Carves shared memory into tiles and, in a second region, the synchronisation data of pipelines.
struct SharedCursor {
  unsigned char *tiles, *sync;

  template <typename Pipeline>
  TK_DEVICE_METHOD Pipeline pipeline() {
    const Pipeline pipeline(tiles, sync);
    tiles += Pipeline::kTileBytes;
    sync += Pipeline::kSyncBytes;
    return pipeline;
  }
  template <typename Tile>
  TK_DEVICE_METHOD Tile tile() {
    const Tile tile{reinterpret_cast<decltype(Tile::data)>(tiles)};
    tiles += Tile::kBytes;
    return tile;
  }
};

// Releases a stage on behalf of one warp, after all of its lanes have read it.
template <typename Pipeline>
TK_DEVICE void release(const Pipeline& pipeline, const typename Pipeline::State& state) {
  __syncwarp();  // all lanes
  if (lane_index() == 0) pipeline.release(state);
}

// Fills a stage by TMA with the rows of a head from `row` on, one panel per copy. Called by one
// thread. TMA writes zeros for elements outside the tensor.
template <typename Pipeline>
TK_DEVICE void fill_by_tma(const Pipeline& pipeline, const typename Pipeline::State& state,
                           const TensorMap& map, int row, int head, int entry) {
  using Tile = typename Pipeline::Tile;
  const Tile tile = pipeline.tile(state);
  mbarrier_arrive_expect(pipeline.full(state), Tile::kBytes);
#pragma unroll
  for (int column = 0; column < Tile::kWidth; column += Tile::kPanel) {
    load_tensor(tile.at(0, column), map, pipeline.full(state), {column, row, head, entry});
  }
}

// True if the condition holds for some row in [first, last). Warp-collective.
template <typename Condition>
TK_DEVICE bool any_row(int first, int last, const Condition& condition) {
  bool found = false;
  for (int row = first + lane_index(); row < last; row += kWarp) found |= condition(row);
  return __any_sync(~0u, found) != 0;
}

// True if some row in [first, last) is not live. Such rows may hold NaN, which TMA would load; past
// the end of the tensor it writes zeros. Warp-collective.
template <typename IsLive>
TK_DEVICE bool has_dead_rows(const IsLive& is_live, int first, int last) {
  return any_row(first, last, [&](int row) { return !is_live(row); });
}

// Fills a stage by cp.async: live rows are copied, dead rows become zeros without being read.
// Called by warp 0 of the CTA.
template <typename Pipeline, typename Element, typename IsLive>
TK_DEVICE void fill_live_rows(const Pipeline& pipeline, const typename Pipeline::State& state,
                              const Rows<const Element>& rows, int row, const IsLive& is_live) {
  start_load<kWarp>(pipeline.tile(state), rows, row, false, is_live);
  wait_copies<0>();
  fence_async();
  __syncwarp();
  if (elect_one()) mbarrier_arrive(pipeline.full(state));
}

}  // namespace tk::cuda::sm90
