// Consumer of the forward pass: a warpgroup that owns 64 queries of every tile of its CTA.
#pragma once

#include "cuda/common/dropout.cuh"
#include "cuda/common/masks.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/forward_shape.cuh"

namespace tk::cuda::sm90 {

// Ping-pong scheduler: one consumer at a time issues its matrix products.
template <int kConsumers>
struct PingPong {
  int consumer;

  TK_DEVICE_METHOD void begin() const {
    if (consumer == kConsumers - 1) signal_next();
  }
  TK_DEVICE_METHOD void wait() const {
    named_barrier_sync(kPingPongBarrier + consumer, 2 * kWarpgroupThreads);
  }
  TK_DEVICE_METHOD void signal_next() const {
    named_barrier_arrive(kPingPongBarrier + (consumer + 1) % kConsumers, 2 * kWarpgroupThreads);
  }
};

// Rows [row, row + 64) of every tile. The tile in progress is the one at the position of q.
template <typename Shape>
class ForwardConsumer {
 public:
  TK_DEVICE_METHOD ForwardConsumer(const ForwardArguments& a, const Shape& shared, int consumer)
      : a_(a), shared_(shared), row_(consumer * kWarpgroupRows), ping_pong_{consumer} {}

  TK_DEVICE_METHOD void run() {
    ping_pong_.begin();
    shared_.q.wait_full(state_.q);
    while (!tile_at(state_.q).is_none()) {
      if (tile_at(state_.q).any_keys) {
        process_tiles_with_keys();
      } else {
        process_tile_without_keys();
      }
    }
    release_stored();
  }

 private:
  using Element = typename Shape::Element;
  using QueryState = typename Shape::QPipeline::State;
  static constexpr int kN = Shape::kN, kConsumers = Shape::kTile.consumers;
  // The first scores of the next tile are computed while this one ends. Three consumers hide the
  // ends of each other's tiles, and have too few registers: it is slower there.
  static constexpr bool kOverlapsTiles = Shape::kSpareQuery && kConsumers == 2;
  // Under a causal mask the first consumer sees nothing of the last key block of a tile, if the
  // tile has that many more rows.
  static constexpr bool kSkipsBlocks = Shape::kM - kWarpgroupRows >= kN;
  static_assert(!kSkipsBlocks || !kOverlapsTiles);

  TK_DEVICE_METHOD const WorkTile& tile_at(const QueryState& position) const {
    return shared_.q.tile_info(position);
  }
  // First query of the calling warp.
  TK_DEVICE_METHOD int first_query(const WorkTile& tile) const {
    return tile.i0 + row_ + warp_in_warpgroup() * 16;
  }

  TK_DEVICE_METHOD void start_scores() {
    start_gemm_nt(s_, shared_.q.tile(state_.q), row_, shared_.k.tile(state_.k));
  }
  TK_DEVICE_METHOD void start_output() { start_gemm_nn(o_, weights_, shared_.v.tile(state_.v)); }
  TK_DEVICE_METHOD void release_k() {
    release(shared_.k, state_.k);
    state_.k.next();
  }
  TK_DEVICE_METHOD void release_v() {
    release(shared_.v, state_.v);
    state_.v.next();
  }
  TK_DEVICE_METHOD void release_skipped_v() {
    if (!skipped_) return;
    shared_.v.wait_full(state_.v);
    release_v();
  }

  // Weights of a key block, in s, from its scores.
  TK_DEVICE_METHOD void finish_scores(const TileInfo& block) {
    const bool plain = a_.score.plain;
    const float unit = plain ? a_.score.scale * kLog2E : kLog2E;
    const WorkTile& tile = tile_;
    const int j0 = block.index * kN;
    if (!plain) apply(s_, a_, sequence_of(a_, tile.b), tile.h, first_query(tile), j0);
    if (!block.full()) {
      apply_mask(s_, a_.params, sequence_of(a_, tile.b), tile.h, first_query(tile), j0);
    }
    factor_[0] = factor_[1] = 1.0f;
    softmax_.template update_max<Element>(
        s_, unit, [&](int, int half, float factor) { factor_[half] = factor; });
    softmax_.template exponentiate<Element>(s_, unit);
    if (a_.dropout.seed) drop(s_, a_.dropout, head_, first_query(tile), j0);
  }
  TK_DEVICE_METHOD void round_weights() {
#pragma unroll
    for (int k = 0; k < kN / 16; ++k) to_a(weights_[k], s_, 0, k);
  }
  TK_DEVICE_METHOD void multiply_output() {
    for (int half = 0; half < 2; ++half) softmax_.multiply(o_, 0, half, factor_[half]);
  }

  TK_DEVICE_METHOD void begin_tile() {
    tile_ = tile_at(state_.q);
    head_ = philox_head(a_.dropout, tile_.b, tile_.h);
    o_.clear();
    softmax_.clear();
  }

  // Iterates over the key blocks of a tile whose first scores are complete. Leaves the weights of
  // the last one to be multiplied by v. Skips a last block that none of the consumer's queries
  // sees.
  TK_DEVICE_METHOD void mainloop() {
    TileInfo block = shared_.k.tile_info(state_.k);
    skipped_ = false;
    release_k();
    finish_scores(block);
    round_weights();
    release_stored();
    while (!block.last()) {
      shared_.k.wait_full(state_.k);
      block = shared_.k.tile_info(state_.k);
      ping_pong_.wait();
      skipped_ = kSkipsBlocks && block.dead_strips() > ping_pong_.consumer;
      if (skipped_) {
        ping_pong_.signal_next();
        release_k();
        return;
      }
      start_scores();
      shared_.v.wait_full(state_.v);
      start_output();
      ping_pong_.signal_next();
      wait_gemm<1>(s_);
      release_k();
      finish_scores(block);
      wait_gemm<0>(o_);
      release_v();
      if (factor_[0] != 1.0f || factor_[1] != 1.0f) multiply_output();
      round_weights();
    }
  }

  // Stores lse of the tile at a position of q. Leaves the factors of o.
  TK_DEVICE_METHOD void finish_softmax(const QueryState& position) {
    const WorkTile& tile = tile_at(position);
    const ForwardParams& p = a_.params;
    const Sequence seq = sequence_of(a_, tile.b);
    const int i0 = first_query(tile);
    const int64_t statistics = statistics_offset(p, seq, tile.h);
    const float unit = a_.score.plain ? a_.score.scale : 1.0f;
    softmax_.finish(a_.dropout.factor, unit, [&](int, int half, float share, const LogSumExp& lse) {
      factor_[half] = share;
      const int i = i0 + row_of(2 * half);
      if (i >= 0 && i < seq.M && lane_index() % 4 == 0) store_lse(p, statistics + i, lse);
    });
  }

  // Stores o of the tile at a position of q, staged in that stage.
  TK_DEVICE_METHOD void store_output(const QueryState& position) {
    const WorkTile& tile = tile_at(position);
    const ForwardParams& p = a_.params;
    const Sequence seq = sequence_of(a_, tile.b);
    multiply_output();
    const auto rows = output_of<Element>(a_, a_.o, p.o, seq.at, tile.h, seq.first_q, seq.M, p.D_v);
    store(o_, rows, tile.i0 + row_, typename Shape::OTile{shared_.q.tile(position).data}, row_);
    stored_ = position;
    is_stored_ = true;
    if (!Shape::kSpareQuery) release_stored();  // else later, when TMA has read it
  }

  // Releases the stage of q from which o is being stored, if there is one.
  TK_DEVICE_METHOD void release_stored() {
    if (is_stored_ && is_warpgroup_leader()) {
      wait_stores_read<0>();
      shared_.q.release(stored_);
    }
    is_stored_ = false;
  }

  // o += p v of the last key block of the tile at a position of q; stores the tile.
  TK_DEVICE_METHOD void finish_tile(const QueryState& position) {
    start_output();
    finish_softmax(position);
    wait_gemm<0>(o_);
    release_v();
    store_output(position);
    release_skipped_v();
  }

  // The same, while the first scores of the next tile are computed.
  TK_DEVICE_METHOD void finish_tile_and_start_next(const QueryState& position) {
    shared_.k.wait_full(state_.k);
    ping_pong_.wait();
    start_output();
    start_scores();
    ping_pong_.signal_next();
    finish_softmax(position);
    wait_gemm<1>(o_);
    release_v();
    store_output(position);
    wait_gemm<0>(s_);
  }

  // Processes a tile that has keys. If the tiles overlap also those after it, up to one that has
  // none: products in flight must not depend on a branch.
  TK_DEVICE_METHOD void process_tiles_with_keys() {
    shared_.k.wait_full(state_.k);
    start_scores();
    wait_gemm<0>(s_);
    bool overlaps;
    do {
      begin_tile();
      mainloop();
      const QueryState position = state_.q;
      state_.q.next();
      shared_.v.wait_full(state_.v);
      if (kOverlapsTiles) shared_.q.wait_full(state_.q);
      overlaps = kOverlapsTiles && tile_at(state_.q).any_keys;
      if (overlaps) {
        finish_tile_and_start_next(position);
      } else {
        finish_tile(position);
      }
    } while (overlaps);
    if (!kOverlapsTiles) shared_.q.wait_full(state_.q);
  }

  TK_DEVICE_METHOD void process_tile_without_keys() {
    release_stored();
    begin_tile();
    finish_softmax(state_.q);
    store_output(state_.q);
    state_.q.next();
    shared_.q.wait_full(state_.q);
  }

  const ForwardArguments& a_;
  const Shape& shared_;
  int row_;
  PingPong<kConsumers> ping_pong_;
  ForwardPipelineStates<Shape> state_;
  WorkTile tile_;  // for the main loop; its end reads shared memory, which saves registers
  PhiloxHead head_;
  Accumulator<1, kN / 8> s_;
  Fragment<Element> weights_[kN / 16];
  Accumulator<1, Shape::OTile::kWidth / 8> o_;
  SoftmaxState<1> softmax_;
  float factor_[2];  // of the rows of o
  QueryState stored_;
  bool is_stored_ = false, skipped_ = false;
};

}  // namespace tk::cuda::sm90
