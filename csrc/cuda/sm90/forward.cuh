// The forward pass on Hopper. One warp loads, by TMA; the other warpgroups each own 64 queries of a
// block's and walk over the keys they see:
//
//   s = q k^T                         of the next keys, while o += p v of these is under way
//   m' = max(m, max s), p = 2^(s - m'), l = l 2^(m - m') + sum p
//   o = o 2^(m - m')                  when p v is there, and only if m rose far
//
// Groups take turns to start products, so that one's are computed while another has its softmax.
// docs/hopper.md.
#pragma once

#include "cuda/common/dropout.cuh"
#include "cuda/common/masks.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/tile_scheduler.cuh"

namespace tk::cuda::sm90 {

struct ForwardArguments : Arguments<ForwardParams> {
  WorkOrder order;
  TensorMap q, k, v, o;
};

template <typename Element_, int kWidth, int kVWidth>
struct ForwardShape {
  using Element = Element_;
  static constexpr HopperForwardTile kTile = hopper_forward_tile(kWidth);
  static constexpr int kM = kTile.block_m(), kN = kTile.block_n;
  static_assert(kVWidth <= kWidth);  // o is staged where q was

  using QRing = Ring<SharedTile<Element, kM, kWidth>, kTile.q_stages>;
  using KRing = Ring<SharedTile<Element, kN, kWidth>, kTile.stages>;
  using VRing = Ring<SharedTile<Element, kN, kVWidth>, kTile.stages>;
  using OTile = SharedTile<Element, kM, kVWidth>;
  static constexpr int kTileBytes = QRing::kTileBytes + KRing::kTileBytes + VRing::kTileBytes;
  static constexpr int kBytes =
      kPatternBytes + kTileBytes + QRing::kOtherBytes + KRing::kOtherBytes + VRing::kOtherBytes;
  static_assert(kBytes == kTile.bytes(kWidth, kVWidth));

  QRing q;
  KRing k;
  VRing v;

  TK_DEVICE_METHOD explicit ForwardShape(unsigned char* shared)
      : ForwardShape(SharedCursor{shared, shared + kTileBytes}) {}

 private:
  TK_DEVICE_METHOD explicit ForwardShape(SharedCursor at)
      : q(at.ring<QRing>()), k(at.ring<KRing>()), v(at.ring<VRing>()) {}
};

// Where a thread is in the rings.
template <typename Shape>
struct ForwardPlaces {
  typename Shape::QRing::At q;
  typename Shape::KRing::At k;
  typename Shape::VRing::At v;
};

template <typename Shape>
TK_DEVICE void load(const ForwardArguments& a, const Shape& shared) {
  constexpr int kM = Shape::kM, kN = Shape::kN;
  const ForwardParams& p = a.params;
  const bool packed = a.varlen.cu_seqlens_q != nullptr;
  ForwardPlaces<Shape> at;
  for_each_work(a, a.order, kM, [&](const Work& work) {
    const Sequence seq = sequence_of(a, work.b);
    const int h_kv = work.h / static_cast<int>(p.H_q / p.H_kv);
    const int i0 = work.i0, i1 = min(i0 + kM, seq.M);
    const LiveKeys used = live_keys_of(a, seq);
    const auto load_k = [&](const Block& block, bool last) {
      shared.k.wait_empty(at.k);
      if (elect_one()) {
        shared.k.note(at.k) = {block.index, work.h, block.full, last};
        fill(shared.k, at.k, a.k, seq.first_k + block.index * kN, h_kv, seq.at);
      }
      at.k.next();
    };
    const auto load_v = [&](const Block& block) {
      // A weight of 0 does not hide NaN in values that nobody sees.
      const int j0 = block.index * kN, j1 = packed ? j0 + kN : min(j0 + kN, seq.N);
      shared.v.wait_empty(at.v);
      if (!block.full && has_hidden_rows(used, j0, j1)) {
        using Element = typename Shape::Element;
        const auto v = rows_of<const Element>(p.v, seq.at, h_kv, seq.first_k, p.D_v);
        fill_by_hand(shared.v, at.v, v, j0, used);
      } else if (elect_one()) {
        fill(shared.v, at.v, a.v, seq.first_k + j0, h_kv, seq.at);
      }
      at.v.next();
    };

    const auto visible = [&](int n) {
      return tile_visible(p, seq, work.h, i0, i1, n * kN, (n + 1) * kN);
    };
    BlockIterator iterator(key_blocks(seq, i0, i1, kN), visible);
    Block block = iterator.next();
    Block next = block.index >= 0 ? iterator.next() : block;
    if (block.index >= 0) load_k(block, next.index < 0);
    shared.q.wait_empty(at.q);
    if (elect_one()) {
      shared.q.note(at.q) = {0, work.h, false, block.index < 0};  // whether there are no keys
      fill(shared.q, at.q, a.q, seq.first_q + i0, work.h, seq.at);
    }
    at.q.next();
    while (block.index >= 0) {
      const Block after = next.index >= 0 ? iterator.next() : next;
      if (next.index >= 0) load_k(next, after.index < 0);
      load_v(block);
      block = next;
      next = after;
    }
  });
}

// Products of one group at a time.
template <int kConsumers>
struct Turns {
  int group;

  TK_DEVICE_METHOD void begin() const {
    if (group == kConsumers - 1) pass();
  }
  TK_DEVICE_METHOD void wait() const { named_barrier_sync(kTurn + group, 2 * kGroupThreads); }
  TK_DEVICE_METHOD void pass() const {
    named_barrier_arrive(kTurn + (group + 1) % kConsumers, 2 * kGroupThreads);
  }
};

// What a group has summed when all keys have passed.
template <typename Shape>
struct Sums {
  static constexpr int kColumns = Shape::OTile::kWidth / 8;
  Accumulator<1, kColumns> o;
  SoftmaxState<1> softmax;

  TK_DEVICE_METHOD void rescale(const float (&factor)[2]) {
    for (int half = 0; half < 2; ++half) softmax.multiply(o, 0, half, factor[half]);
  }
};

// Adds up all keys that rows row .. row + 63 of the work see; i0 is the query of this warp's first.
template <typename Shape>
TK_DEVICE void attend(const ForwardArguments& a, const Shape& shared, ForwardPlaces<Shape>& at,
                      const Work& work, int row, int i0, const Turns<Shape::kTile.consumers>& turns,
                      Sums<Shape>& sums) {
  using Element = typename Shape::Element;
  constexpr int kN = Shape::kN;
  const ForwardParams& p = a.params;
  const bool plain = has_plain_scores<Element>(p.score);
  const float unit = plain ? static_cast<float>(p.score.scale) * kLog2E : kLog2E;

  Accumulator<1, kN / 8> s;
  Fragment<Element> weights[kN / 16];
  float rescale[2];
  const auto finish_scores = [&](const Note& block) {
    const int j0 = block.index * kN;
    if (!plain) apply(s, p, sequence_of(a, work.b), work.h, i0, j0);
    if (!block.full) apply_mask(s, p, sequence_of(a, work.b), work.h, i0, j0);
    rescale[0] = rescale[1] = 1.0f;
    sums.softmax.template update_max<Element>(
        s, unit, [&](int, int half, float factor) { rescale[half] = factor; });
    sums.softmax.template exponentiate<Element>(s, unit);
    if (a.dropout.seed) drop(s, a.dropout, work.b, work.h, i0, j0);
  };
  const auto round_weights = [&] {
#pragma unroll
    for (int k = 0; k < kN / 16; ++k) to_a(weights[k], s, 0, k);
  };
  const auto release = [](const auto& ring, auto& place) {
    __syncwarp();  // all lanes have read the note
    if (lane_index() == 0) ring.release(place);
    place.next();
  };

  shared.k.wait_full(at.k);
  Note block = shared.k.note(at.k);
  start_scores(s, shared.q.tile(at.q), row, shared.k.tile(at.k));
  wait_product<0>(s);
  release(shared.k, at.k);
  finish_scores(block);
  round_weights();
  while (!block.last) {
    shared.k.wait_full(at.k);
    block = shared.k.note(at.k);
    turns.wait();
    start_scores(s, shared.q.tile(at.q), row, shared.k.tile(at.k));
    shared.v.wait_full(at.v);
    start_sum(sums.o, weights, shared.v.tile(at.v));
    turns.pass();
    wait_product<1>(s);
    release(shared.k, at.k);
    finish_scores(block);
    wait_product<0>(sums.o);
    release(shared.v, at.v);
    if (rescale[0] != 1.0f || rescale[1] != 1.0f) sums.rescale(rescale);
    round_weights();
  }
  shared.v.wait_full(at.v);
  start_sum(sums.o, weights, shared.v.tile(at.v));
  wait_product<0>(sums.o);
  release(shared.v, at.v);
}

// o and lse of rows row .. row + 63 of the work. o goes through the tile where q was.
template <typename Shape>
TK_DEVICE void write(const ForwardArguments& a, const Shape& shared, const ForwardPlaces<Shape>& at,
                     const Work& work, int row, int i0, Sums<Shape>& sums) {
  using Element = typename Shape::Element;
  const ForwardParams& p = a.params;
  const Sequence seq = sequence_of(a, work.b);
  float* const lse = static_cast<float*>(p.lse) + statistics_offset(p, seq, work.h);
  const float unit = has_plain_scores<Element>(p.score) ? static_cast<float>(p.score.scale) : 1.0f;
  sums.softmax.finish(a.dropout.factor, unit, [&](int, int half, float share, float x) {
    sums.softmax.multiply(sums.o, 0, half, share);
    const int i = i0 + row_of(2 * half);
    if (i < seq.M && lane_index() % 4 == 0) lse[i] = x;
  });
  const auto o = result_of<Element>(a, a.o, p.o, seq.at, work.h, seq.first_q, seq.M, p.D_v);
  store(sums.o, o, work.i0 + row, typename Shape::OTile{shared.q.tile(at.q).data}, row);
}

template <typename Element, int kWidth, int kVWidth>
TK_KERNEL(hopper_forward_tile(kWidth).threads(), 1)
forward_kernel(const __grid_constant__ ForwardArguments a) {
  using Shape = ForwardShape<Element, kWidth, kVWidth>;
  constexpr HopperForwardTile kTile = Shape::kTile;
  TK_SHARED_MEMORY(memory);
  const Shape shared(memory + (-shared_address(memory) & (kPatternBytes - 1)));
  if (threadIdx.x == 0) {
    shared.q.init(kTile.consumers);
    shared.k.init(kTile.consumers * kGroupWarps);
    shared.v.init(kTile.consumers * kGroupWarps);
    fence_mbarrier_init();
  }
  __syncthreads();

  if (threadIdx.x < kGroupThreads) {
    release_registers<kTile.producer_registers>();
    if (warp_index() == 0) load(a, shared);
  } else {
    request_registers<kTile.registers>();
    const int group = uniform_group_index();
    const int row = group * kGroupRows;
    const Turns<kTile.consumers> turns{group};
    ForwardPlaces<Shape> at;
    turns.begin();
    for_each_work(a, a.order, Shape::kM, [&](const Work& work) {
      const int i0 = work.i0 + row + group_warp() * 16;
      Sums<Shape> sums;
      sums.o.clear();
      sums.softmax.clear();
      shared.q.wait_full(at.q);
      if (!shared.q.note(at.q).last) attend(a, shared, at, work, row, i0, turns, sums);
      write(a, shared, at, work, row, i0, sums);
      if (is_first_of_group()) shared.q.release(at.q);
      at.q.next();
    });
  }
}

}  // namespace tk::cuda::sm90
