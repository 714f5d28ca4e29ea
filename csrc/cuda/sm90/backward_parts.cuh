// What a block of the backward pass does beside products: it loads, has the gradient of scores, and
// writes dk and dv.
#pragma once

#include "cuda/common/masks.cuh"
#include "cuda/sm90/dropout_mask.cuh"
#include "cuda/sm90/epilogue.cuh"

namespace tk::cuda::sm90 {

// What a block shares of its inputs: rows of q and k of at most kRowWidth, of v and do of at most
// kRowVWidth.
template <typename Element_, int kRowWidth, int kRowVWidth>
struct BackwardRings {
  using Element = Element_;
  static constexpr int kWidth = hopper_backward_width(kRowWidth);
  static constexpr int kVWidth = hopper_backward_width(kRowVWidth);
  static constexpr HopperBackwardTile kTile = hopper_backward_tile(kWidth);
  static constexpr int kM = kTile.block_m, kN = kTile.block_n, kConsumers = kTile.kConsumers;

  using KeyRing = Ring<SharedTile<Element, kN, kWidth>, 1>;
  using ValueRing = Ring<SharedTile<Element, kN, kVWidth>, 1>;
  using QueryRing = Ring<SharedTile<Element, kM, kWidth>, kTile.stages>;
  using GradientRing = Ring<SharedTile<Element, kM, kVWidth>, kTile.stages>;
  using TermsRing = Ring<Terms<kM>, kTile.stages>;
  static constexpr int kRingsBytes = KeyRing::kTileBytes + ValueRing::kTileBytes +
                                     QueryRing::kTileBytes + GradientRing::kTileBytes +
                                     TermsRing::kTileBytes;
  static_assert(kRingsBytes % kPatternBytes == 0);  // what follows may be a tile
  static constexpr int kOtherBytes = KeyRing::kOtherBytes + ValueRing::kOtherBytes +
                                     QueryRing::kOtherBytes + GradientRing::kOtherBytes +
                                     TermsRing::kOtherBytes;

  KeyRing k;
  ValueRing v;
  QueryRing q;
  GradientRing d_o;
  TermsRing terms;

 protected:
  TK_DEVICE_METHOD explicit BackwardRings(SharedCursor& at)
      : k(at.ring<KeyRing>()),
        v(at.ring<ValueRing>()),
        q(at.ring<QueryRing>()),
        d_o(at.ring<GradientRing>()),
        terms(at.ring<TermsRing>()) {}
};

// A weight of 0 that tells itself from one that is too small for a float.
constexpr float kHiddenWeight = -0.0f;
TK_DEVICE bool is_hidden_weight(float weight) { return __float_as_uint(weight) == 1u << 31; }

// How many blocks of keys before these see something of a tile of queries. By a warp.
template <typename Shape>
TK_DEVICE int turn_of(const BackwardArguments& a, const Sequence& seq, int h, int i0, int n) {
  constexpr int kN = Shape::kN;
  const int i1 = min(i0 + Shape::kM, seq.M);
  const auto visible = [&](int other) {
    return tile_visible(a.params, seq, h, i0, i1, other * kN, (other + 1) * kN);
  };
  return BlockIterator(key_blocks(seq, i0, i1, kN), visible).before(n);
}

// Tiles of queries that see some of these keys, of one head after the other.
template <typename Shape>
TK_DEVICE void load(const BackwardArguments& a, const Shape& shared, const KeyWork& work) {
  using Element = typename Shape::Element;
  constexpr int kM = Shape::kM, kN = Shape::kN;
  const BackwardParams& p = a.params;
  const Sequence seq = sequence_of(a, work.b);
  const int j0 = work.n * kN, j1 = j0 + kN, heads = static_cast<int>(p.H_q / p.H_kv);
  const bool packed = a.varlen.cu_seqlens_q != nullptr;

  int h = work.h_kv * heads;
  const int last_h = h + heads - 1;
  const auto visible = [&](int m) {
    return tile_visible(p, seq, h, m * kM, min((m + 1) * kM, seq.M), j0, j1);
  };
  BlockIterator iterator(query_blocks(seq, j0, j1, kM), visible);
  const auto advance = [&] {
    Block block = iterator.next();
    while (block.index < 0 && h < last_h) {
      ++h;
      iterator.restart();
      block = iterator.next();
    }
    return block;
  };
  Block block = advance();
  const typename Shape::KeyRing::At only;
  typename Shape::QueryRing::At at;

  // What nobody sees may be NaN, which gradients of 0 do not hide.
  const LiveKeys used = live_keys_of(a, seq);
  const bool hidden = has_hidden_rows(used, j0, packed ? j1 : min(j1, seq.N));
  if (elect_one()) {
    shared.k.note(only) = {work.n, h, false, block.index < 0};  // whether no query sees them
    if (!hidden) fill(shared.k, only, a.k, seq.first_k + j0, work.h_kv, seq.at);
    fill(shared.v, only, a.v, seq.first_k + j0, work.h_kv, seq.at);
  }
  if (hidden) {
    __syncwarp();
    const auto k = rows_of<const Element>(p.k, seq.at, work.h_kv, seq.first_k, p.D);
    fill_by_hand(shared.k, only, k, j0, used);
  }

  while (block.index >= 0) {
    const int i0 = block.index * kM;
    Note note{block.index, h, block.full, false, tile_of<kM>(a, seq, h, block.index)};
    if (a.turns) note.turn = turn_of<Shape>(a, seq, h, i0, work.n);
    const float* const terms = a.terms + int64_t{note.tile} * 2 * kM;
    block = advance();
    note.last = block.index < 0;
    shared.terms.wait_empty(at);
    if (elect_one()) {
      shared.terms.note(at) = note;
      mbarrier_arrive_expect(shared.terms.full(at), Terms<kM>::kBytes);
      load_bulk(shared.terms.tile(at).data, terms, Terms<kM>::kBytes, shared.terms.full(at));
    }
    const auto there = [&](int i) { return i < seq.M && terms[i - i0] < INFINITY; };
    const bool by_hand = !(note.full && i0 + kM <= seq.M) &&
                         has_hidden_rows(there, i0, packed ? i0 + kM : min(i0 + kM, seq.M));
    const auto load_rows = [&](auto& ring, const TensorMap& map, const Strided& x, int64_t width) {
      ring.wait_empty(at);
      if (by_hand) {
        fill_by_hand(ring, at, rows_of<const Element>(x, seq.at, note.h, seq.first_q, width), i0,
                     there);
      } else if (elect_one()) {
        fill(ring, at, map, seq.first_q + i0, note.h, seq.at);
      }
    };
    load_rows(shared.q, a.q, p.q, p.D);
    load_rows(shared.d_o, a.d_o, p.d_o, p.D_v);
    at.next();
  }
}

// Of a warp's 16 keys: products become z p, but for dropout's factor, and do v, which may still be
// under way, da. The accumulators' first element is that of key j0 and of the tile's query
// `column`.
template <typename Shape, int kN, typename Kept>
TK_DEVICE void differentiate(const BackwardArguments& a, const KeyWork& work, const Note& note,
                             const Terms<Shape::kM>& terms, int column, int j0, const Kept& kept,
                             Accumulator<1, kN>& s, Accumulator<1, kN>& dp) {
  constexpr bool kDrops = std::is_same_v<Kept, KeptWeights<kN>>;
  const BackwardParams& p = a.params;
  const bool plain = has_plain_scores<typename Shape::Element>(p.score);
  const float unit = plain ? static_cast<float>(p.score.scale) * kLog2E : kLog2E;
  const int i0 = note.index * Shape::kM + column;
  const float *const lse = terms.lse() + column, *const delta = terms.delta() + column;
  wait_product<1>(s);
  if (plain) {
    if (!note.full) apply_mask<RowsAre::kKeys>(s, p, sequence_of(a, work.b), note.h, i0, j0);
    s.for_each([&](int, int query, float& x) {
      const bool hidden = !note.full && x == -INFINITY;
      x = exp2_approx(fmaf(x, unit, -lse[query]));
      if (hidden) x = kHiddenWeight;
    });
  }
  wait_product<0>(dp);
  for_each_element<1, kN>([&](int m, int n, int e) {
    float& x = dp.x[m][n][e];
    if constexpr (kDrops) x = kept(n, e) ? x * a.dropout.factor : 0.0f;
    x -= delta[8 * n + column_of(e)];
  });
  if (!plain) {
    const Sequence seq = sequence_of(a, work.b);
    const Scores scores = scores_of(p, seq, note.h);
    const auto weigh = [&](int row, int query, float& product, float& gradient) {
      const int i = i0 + query, j = j0 + row;
      const Score one = score(scores, product, i, j);
      const float weight = exp2_approx(fmaf(one.value, unit, -lse[query]));
      product = is_visible(p, seq, note.h, i, j) ? weight : kHiddenWeight;
      gradient *= one.derivative;
    };
    for_each_in_memory(weigh, s, dp);
  }
  for_each_element<1, kN>([&](int m, int n, int e) {
    // do may be NaN where nobody sees it.
    const bool hidden = !note.full && is_hidden_weight(s.x[m][n][e]);
    dp.x[m][n][e] = hidden ? 0.0f : s.x[m][n][e] * dp.x[m][n][e];
    if constexpr (kDrops) {
      if (!kept(n, e)) s.x[m][n][e] = 0.0f;  // as a choice of two it would take registers
    }
  });
}

// By a group: 64 rows of dk and dv from `row` on, columns from k_column and v_column on, through
// the tiles where k and v were.
template <typename Shape, int kN, int kVN>
TK_DEVICE void write(const BackwardArguments& a, const Shape& shared, const KeyWork& work,
                     Accumulator<1, kN>& dk, Accumulator<1, kVN>& dv, int row, int k_column = 0,
                     int v_column = 0) {
  using Element = typename Shape::Element;
  const BackwardParams& p = a.params;
  const Sequence seq = sequence_of(a, work.b);
  const float scale = static_cast<float>(p.score.scale);
  for_each_element<1, kN>([&](int m, int n, int e) { dk.x[m][n][e] *= scale; });
  for_each_element<1, kVN>([&](int m, int n, int e) { dv.x[m][n][e] *= a.dropout.factor; });
  const int j0 = work.n * Shape::kN + row;
  const auto dk_rows =
      result_of<Element>(a, a.dk, p.dk, seq.at, work.h_kv, seq.first_k, seq.N, p.D);
  const auto dv_rows =
      result_of<Element>(a, a.dv, p.dv, seq.at, work.h_kv, seq.first_k, seq.N, p.D_v);
  const typename Shape::KeyRing::At only;
  store(dk, dk_rows, j0, shared.k.tile(only), row, k_column);
  store(dv, dv_rows, j0, shared.v.tile(only), row, v_column);
}

// Where a thread's n-th four numbers of a group's part of dq are.
TK_DEVICE int offset_of_four(int n) {
  return (n * kGroupThreads + static_cast<int>(threadIdx.x) % kGroupThreads) * 4;
}

// visit(offset, four) for all that a thread has.
template <int kN, typename Visit>
TK_DEVICE void for_each_four(const Accumulator<1, kN>& dq, const Visit& visit) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float (&x)[4] = dq.x[0][n];
    visit(offset_of_four(n), make_float4(x[0], x[1], x[2], x[3]));
  }
}

}  // namespace tk::cuda::sm90
