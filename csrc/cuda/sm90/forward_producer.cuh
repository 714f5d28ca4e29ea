// Producer of the forward pass: a warp that loads q, k and v of every tile of its CTA by TMA.
//
// v of a key block is loaded behind k of the next one, and v of the last key block of a tile behind
// q and k of the next tile. So the next tile is found while consumers still have key blocks: that
// takes some 500 instructions, which are rarely in the instruction cache.
#pragma once

#include "cuda/common/masks.cuh"
#include "cuda/sm90/forward_shape.cuh"
#include "cuda/sm90/warpgroups.cuh"

namespace tk::cuda::sm90 {

template <typename Shape>
class ForwardProducer {
 public:
  TK_DEVICE_METHOD ForwardProducer(const ForwardArguments& a, const Shape& shared)
      : a_(a), shared_(shared) {}

  TK_DEVICE_METHOD void run() {
    for_each_tile<kM>(a_, a_.scheduler, [&](const WorkTile& tile) { load(tile); });
    load_pending_values();
    shared_.q.wait_empty(state_.q);
    if (elect_one()) {
      shared_.q.tile_info(state_.q) = WorkTile::none();
      mbarrier_arrive(shared_.q.full(state_.q));
    }
  }

 private:
  static constexpr int kM = Shape::kM, kN = Shape::kN;
  // Without a spare stage, q can be loaded only after the consumers have finished the tile before,
  // for which they need its last values.
  static constexpr bool kSpareQuery = Shape::kSpareQuery;

  // Values that have not been loaded yet. row = -1: none.
  struct Values {
    int row, head, entry;
  };

  TK_DEVICE_METHOD void load_pending_values() {
    if (pending_.row < 0) return;
    shared_.v.wait_empty(state_.v);
    if (elect_one()) {
      fill_by_tma(shared_.v, state_.v, a_.v, pending_.row, pending_.head, pending_.entry);
    }
    state_.v.next();
    pending_.row = -1;
  }

  TK_DEVICE_METHOD void load_queries(WorkTile tile, const Sequence& seq, bool any_keys) {
    tile.any_keys = any_keys;
    shared_.q.wait_empty(state_.q);
    if (elect_one()) {
      shared_.q.tile_info(state_.q) = tile;
      fill_by_tma(shared_.q, state_.q, a_.q, seq.first_q + tile.i0, tile.h, seq.at);
    }
    state_.q.next();
  }

  // Loads a tile, up to its last values.
  TK_DEVICE_METHOD void load(const WorkTile& tile) {
    const ForwardParams& p = a_.params;
    const Sequence seq = sequence_of(a_, tile.b);
    const int h_kv = a_.scheduler.key_head(tile.h);
    const int i0 = max(tile.i0, 0), i1 = min(tile.i0 + kM, seq.M);
    const LiveKeys live_keys = live_keys_of(a_, seq, h_kv);
    const auto load_k = [&](const Block& block, bool last) {
      shared_.k.wait_empty(state_.k);
      if (elect_one()) {
        TileInfo info(block.index, tile.h, block.full, last);
        if (last) info.set_dead_strips(dead_strips(seq, tile.i0, block.index * kN, kWarpgroupRows));
        shared_.k.tile_info(state_.k) = info;
        fill_by_tma(shared_.k, state_.k, a_.k, seq.first_k + block.index * kN, h_kv, seq.at);
      }
      state_.k.next();
    };
    const auto load_v = [&](const Block& block, bool last) {
      // Dead values may hold NaN, and 0 x NaN in p v is NaN: they are loaded as zeros.
      const bool is_varlen = a_.varlen.cu_seqlens_q != nullptr;
      const int j0 = block.index * kN, j1 = is_varlen ? j0 + kN : min(j0 + kN, seq.N);
      if (block.full || !has_dead_rows(live_keys, j0, j1)) {
        pending_ = {seq.first_k + j0, h_kv, seq.at};
        if (!last || !kSpareQuery) load_pending_values();
        return;
      }
      using Element = typename Shape::Element;
      const auto v = rows_of<const Element>(p.v, seq.at, h_kv, seq.first_k, p.D_v);
      shared_.v.wait_empty(state_.v);
      fill_live_rows(shared_.v, state_.v, v, j0, live_keys);
      state_.v.next();
    };

    const auto visible = [&](int n) {
      return tile_visible(p, seq, tile.h, i0, i1, n * kN, (n + 1) * kN);
    };
    BlockIterator iterator(key_blocks(seq, i0, i1, kN), visible);
    Block block = iterator.next();
    Block next = block.index >= 0 ? iterator.next() : block;
    const bool any_keys = block.index >= 0;
    if (kSpareQuery) load_queries(tile, seq, any_keys);
    if (any_keys) load_k(block, next.index < 0);
    load_pending_values();
    if (!kSpareQuery) load_queries(tile, seq, any_keys);
    while (block.index >= 0) {
      const Block after = next.index >= 0 ? iterator.next() : next;
      if (next.index >= 0) load_k(next, after.index < 0);
      load_v(block, next.index < 0);
      block = next;
      next = after;
    }
  }

  const ForwardArguments& a_;
  const Shape& shared_;
  ForwardPipelineStates<Shape> state_;
  Values pending_{-1, 0, 0};
};

}  // namespace tk::cuda::sm90
