// The backward pass of rows of at most 128: two groups own 64 keys each, dk and dv of them.
//
//   s = k q^T, dp = v do^T             keys are rows, so that what follows needs no transpose:
//   p = 2^(s - lse), ds = p (dp - delta)
//   dv += p do, dk += ds q             p and ds from registers
//   dq = ds^T k                        of both groups' ds, through shared memory; half of it each
//
// dq leaves by TMA, which adds it to its sums.
#pragma once

#include "cuda/sm90/backward_parts.cuh"

namespace tk::cuda::sm90 {

template <typename Element, int kWidth>
struct ShapeByRows : BackwardRings<Element, kWidth, kWidth> {
  using Rings = BackwardRings<Element, kWidth, kWidth>;
  using Rings::kM, Rings::kN, Rings::kConsumers, Rings::kTile;
  static_assert(kN == kConsumers * kGroupRows);

  // Of dq each group has 64 rows and columns: one tile has as many of the one as of the other.
  static constexpr int kDqColumns = 64, kDqNumbers = kGroupRows * kDqColumns;  // of a group
  static_assert(kM * kWidth == kConsumers * kDqNumbers);
  TK_DEVICE_METHOD static int dq_row(int group) { return kM == 64 ? 0 : group * 64; }
  TK_DEVICE_METHOD static int dq_column(int group) { return kM == 64 ? group * 64 : 0; }

  using DsTile = SharedTile<Element, kN, kM>;
  static constexpr int kDqBytes = kDqNumbers * sizeof(float);  // of a group
  static constexpr int kTilesBytes = Rings::kRingsBytes + DsTile::kBytes + kConsumers * kDqBytes;
  static constexpr int kBytes = kPatternBytes + kTilesBytes + Rings::kOtherBytes;
  static_assert(kBytes == kTile.bytes(kWidth, kWidth));

  DsTile ds;
  float* dq;

  TK_DEVICE_METHOD explicit ShapeByRows(unsigned char* shared)
      : ShapeByRows(SharedCursor{shared, shared + kTilesBytes}) {}

 private:
  TK_DEVICE_METHOD explicit ShapeByRows(SharedCursor at)
      : Rings(at), ds(at.tile<DsTile>()), dq(reinterpret_cast<float*>(at.tiles)) {}
};

// Adds a group's part of dq to the sums, by its first thread.
template <typename Shape>
TK_DEVICE void add_dq(const BackwardArguments& a, const Note& note, const float* from) {
  const int64_t part = int64_t{note.tile} * Shape::kConsumers + group_index();
  if (a.turns) {
    while (load_acquire(a.turns + part) != note.turn) {
    }
    fence_async_global();
  }
  add_bulk(a.dq_sums + part * Shape::kDqNumbers, from, Shape::kDqBytes);
  commit_stores();
  if (a.turns) {
    wait_stores<0>();
    fence_async_global();
    add_release(a.turns + part, 1);
  }
}

template <typename Element, int kWidth, typename Drops>
TK_DEVICE void differentiate_keys(const BackwardArguments& a,
                                  const ShapeByRows<Element, kWidth>& shared, const KeyWork& work,
                                  Drops& drops) {
  using Shape = ShapeByRows<Element, kWidth>;
  constexpr int kM = Shape::kM, kAll = Shape::kConsumers * kGroupThreads;
  const int group = uniform_group_index(), row = group * kGroupRows,
            warp_row = row + group_warp() * 16;
  const int j0 = work.n * Shape::kN;
  const typename Shape::KeyRing::At only;
  typename Shape::QueryRing::At at;
  const auto k = shared.k.tile(only), v = shared.v.tile(only);
  float* const dq_tile = shared.dq + group * Shape::kDqNumbers;

  Accumulator<1, kWidth / 8> dk, dv;
  dk.clear();
  dv.clear();
  shared.k.wait_full(only);
  shared.v.wait_full(only);
  bool last = shared.k.note(only).last;
  while (!last) {
    shared.terms.wait_full(at);
    const Note note = shared.terms.note(at);
    last = note.last;
    Accumulator<1, kM / 8> s, dp;
    shared.q.wait_full(at);
    start_scores(s, k, row, shared.q.tile(at));
    shared.d_o.wait_full(at);
    start_scores(dp, v, row, shared.d_o.tile(at));
    const auto kept = drops.template next<kM / 8>(group, 0);
    differentiate<Shape>(a, work, note, shared.terms.tile(at), 0, j0 + warp_row, kept, s, dp);
    release(shared.terms, at);
    Fragment<Element> weights[kM / 16], ds[kM / 16];
#pragma unroll
    for (int m = 0; m < kM / 16; ++m) {
      to_a(weights[m], s, 0, m);
      to_a(ds[m], dp, 0, m);
    }
    start_sum(dv, weights, shared.d_o.tile(at));
    stage<kM / 16>(shared.ds, warp_row, 0, [&](int m) { return ds[m]; });
    fence_async();
    if (is_first_of_group()) wait_stores_read<0>();
    named_barrier_sync(kAllGroups, kAll);  // ds is there, and dq before has left

    Accumulator<1, Shape::kDqColumns / 8> dq;
    start_sum(dk, ds, shared.q.tile(at));
    start_turned(dq, shared.ds, Shape::dq_row(group), k, Shape::dq_column(group));
    wait_product<0>(dv);
    wgmma_hold(numbers(dk));
    wgmma_hold(numbers(dq));
    release(shared.q, at);
    release(shared.d_o, at);
    for_each_four(
        dq, [&](int offset, const float4& x) { *reinterpret_cast<float4*>(dq_tile + offset) = x; });
    fence_async();
    named_barrier_sync(kAllGroups, kAll);  // dq is there, and ds is read
    if (is_first_of_group()) add_dq<Shape>(a, note, dq_tile);
    at.next();
  }

  write(a, shared, work, dk, dv, row);
  if (is_first_of_group()) wait_stores_read<0>();  // dq too
}

}  // namespace tk::cuda::sm90
