// The backward pass of rows beyond 128: two groups share 64 keys, and each owns half of the columns
// of dk, dv and dq. Scores they share by queries:
//
//   s = k q^T, dp = v do^T             of 32 queries each
//   p = 2^(s - lse), ds = p (dp - delta)
//   --- all threads: p and ds of all queries are in shared memory
//   dv += p do, dk += ds q, dq = ds^T k     half of the columns of each
//
// There are two tiles of p and of ds, used in turn: while one group writes these, the other may
// still read those, so that there is one barrier for each tile of queries. dq is added to its sums
// from registers.
#pragma once

#include "cuda/sm90/backward_parts.cuh"

namespace tk::cuda::sm90 {

template <typename Element, int kRowWidth, int kRowVWidth>
struct ShapeByColumns : BackwardRings<Element, kRowWidth, kRowVWidth> {
  using Rings = BackwardRings<Element, kRowWidth, kRowVWidth>;
  using Rings::kM, Rings::kN, Rings::kConsumers, Rings::kTile, Rings::kWidth, Rings::kVWidth;
  static_assert(kM == 64 && kN == kGroupRows);

  static constexpr int kColumns = kWidth / kConsumers,
                       kVColumns = kVWidth / kConsumers;  // of a group
  static constexpr int kDqColumns = kColumns, kDqNumbers = kM * kDqColumns;
  TK_DEVICE_METHOD static int dq_row(int) { return 0; }
  TK_DEVICE_METHOD static int dq_column(int group) { return group * kDqColumns; }

  using SquareTile = SharedTile<Element, kN, kM>;
  struct Squares {
    SquareTile p, ds;
  };
  static constexpr int kSquareNumbers = kN * kM;
  static constexpr int kTilesBytes = Rings::kRingsBytes + 4 * SquareTile::kBytes;
  static constexpr int kBytes = kPatternBytes + kTilesBytes + Rings::kOtherBytes;
  static_assert(kBytes == kTile.bytes(kWidth, kVWidth));

  TK_DEVICE_METHOD explicit ShapeByColumns(unsigned char* shared)
      : ShapeByColumns(SharedCursor{shared, shared + kTilesBytes}) {}

  TK_DEVICE_METHOD Squares squares(bool second) const {
    Element* const from = first_ + (second ? 2 * kSquareNumbers : 0);
    return {{from}, {from + kSquareNumbers}};
  }

 private:
  TK_DEVICE_METHOD explicit ShapeByColumns(SharedCursor at)
      : Rings(at), first_(at.tile<SquareTile>().data) {}

  Element* first_;
};

// Adds a group's part of dq to the sums, by all its threads.
template <typename Shape, int kN>
TK_DEVICE void add_dq(const BackwardArguments& a, const Note& note, const Accumulator<1, kN>& dq) {
  const int64_t part = int64_t{note.tile} * Shape::kConsumers + group_index();
  if (a.turns) {
    if (is_first_of_group()) {
      while (load_acquire(a.turns + part) != note.turn) {
      }
    }
    group_sync();
  }
  float* const sums = a.dq_sums + part * Shape::kDqNumbers;
  for_each_four(dq, [&](int offset, const float4& x) { add_to(sums + offset, x); });
  if (a.turns) {
    __threadfence();
    group_sync();
    if (is_first_of_group()) add_release(a.turns + part, 1);
  }
}

template <typename Element, int kRowWidth, int kRowVWidth, typename Drops>
TK_DEVICE void differentiate_keys(const BackwardArguments& a,
                                  const ShapeByColumns<Element, kRowWidth, kRowVWidth>& shared,
                                  const KeyWork& work, Drops& drops) {
  using Shape = ShapeByColumns<Element, kRowWidth, kRowVWidth>;
  constexpr int kAll = Shape::kConsumers * kGroupThreads, kQueries = Shape::kM / Shape::kConsumers;
  const int group = uniform_group_index(), warp_row = group_warp() * 16;
  const int query = group * kQueries, j0 = work.n * Shape::kN;
  const int k_column = group * Shape::kColumns, v_column = group * Shape::kVColumns;
  const typename Shape::KeyRing::At only;
  typename Shape::QueryRing::At at;
  const auto k = shared.k.tile(only);
  const auto v = shared.v.tile(only);

  Accumulator<1, Shape::kColumns / 8> dk;
  Accumulator<1, Shape::kVColumns / 8> dv;
  dk.clear();
  dv.clear();
  shared.k.wait_full(only);
  shared.v.wait_full(only);
  bool last = shared.k.note(only).last, second = false;
  while (!last) {
    shared.terms.wait_full(at);
    const Note note = shared.terms.note(at);
    last = note.last;
    Accumulator<1, kQueries / 8> s, dp;
    shared.q.wait_full(at);
    start_scores(s, k, 0, shared.q.tile(at), query);
    shared.d_o.wait_full(at);
    start_scores(dp, v, 0, shared.d_o.tile(at), query);
    const auto kept = drops.template next<kQueries / 8>(0, query);
    differentiate<Shape>(a, work, note, shared.terms.tile(at), query, j0 + warp_row, kept, s, dp);
    release(shared.terms, at);
    const auto [p_tile, ds_tile] = shared.squares(second);
    const auto put = [&](const auto& tile, auto& x) {
      stage<kQueries / 16>(tile, warp_row, query, [&](int m) {
        Fragment<Element> rounded;
        to_a(rounded, x, 0, m);
        return rounded;
      });
    };
    put(p_tile, s);
    put(ds_tile, dp);
    fence_async();
    named_barrier_sync(kAllGroups, kAll);  // p and ds are there

    Accumulator<1, Shape::kDqColumns / 8> dq;
    start_sum(dv, p_tile, shared.d_o.tile(at), v_column);
    start_sum(dk, ds_tile, shared.q.tile(at), k_column);
    start_turned(dq, ds_tile, 0, k, k_column);
    wait_product<0>(dv);
    wgmma_hold(numbers(dk));
    wgmma_hold(numbers(dq));
    release(shared.q, at);
    release(shared.d_o, at);
    add_dq<Shape>(a, note, dq);
    at.next();
    second = !second;
  }

  // dk will be where k is, of which the other group may still read its own columns. A wait for a
  // product is not said to be one for the other warps' part of it.
  group_sync();
  write(a, shared, work, dk, dv, 0, k_column, v_column);
}

}  // namespace tk::cuda::sm90
