// The backward pass on Hopper: a block takes 128 keys of one key head, and one warp loads the
// queries that see them, of every query head that shares it. Two warpgroups own 64 keys each:
//
//   s = k q^T, dp = v do^T             keys are rows, so that what follows needs no transpose:
//   p = 2^(s - lse), ds = p (dp - delta)
//   dv += p do, dk += ds q             p and ds from registers
//   dq = ds^T k                        of both groups' ds, through shared memory; half of it each
//
// dq leaves by TMA, which adds it to sums in float32; a kernel of its own brings those into place.
// In deterministic mode blocks of keys add in their order, as in sm80/backward.cuh. docs/hopper.md.
#pragma once

#include "../sm80/visibility.cuh"
#include "results.cuh"
#include "row_terms.cuh"

namespace tk::cuda::sm90 {

template <typename Element_, int kWidth>
struct BackwardShape {
  using Element = Element_;
  static constexpr HopperBackwardTile kTile = hopper_backward_tile(kWidth);
  static constexpr int kM = kTile.block_m, kN = kTile.kBlockN, kGroups = kTile.kGroups;
  // Of dq each group has 64 rows and columns: one tile has as many of the one as of the other.
  static_assert(kM * kWidth == kGroups * 64 * 64);

  using KeyRing = Ring<SharedTile<Element, kN, kWidth>, 1>;
  using QueryRing = Ring<SharedTile<Element, kM, kWidth>, kTile.stages>;
  using TermsRing = Ring<Terms<kM>, kTile.stages>;
  using DsTile = SharedTile<Element, kN, kM>;
  static constexpr int kDqBytes = kGroupThreads * 32 * sizeof(float);  // of a group

  KeyRing k, v;
  QueryRing q, d_o;
  DsTile ds;
  float* dq;
  TermsRing terms;

  TK_DEVICE_METHOD explicit BackwardShape(unsigned char* shared)
      : k(shared, shared + kOthers),
        v(shared + kV, shared + kOthers + KeyRing::kOtherBytes),
        q(shared + kQ, shared + kOthers + 2 * KeyRing::kOtherBytes),
        d_o(shared + kDo, shared + kOthers + 2 * KeyRing::kOtherBytes + QueryRing::kOtherBytes),
        ds{reinterpret_cast<Element*>(shared + kDs)},
        dq(reinterpret_cast<float*>(shared + kDq)),
        terms(shared + kTerms,
              shared + kOthers + 2 * KeyRing::kOtherBytes + 2 * QueryRing::kOtherBytes) {}

 private:
  static constexpr int kV = KeyRing::kTileBytes, kQ = 2 * kV, kDo = kQ + QueryRing::kTileBytes;
  static constexpr int kDs = kDo + QueryRing::kTileBytes, kDq = kDs + DsTile::kBytes;
  static constexpr int kTerms = kDq + kGroups * kDqBytes;
  static constexpr int kOthers = kTerms + TermsRing::kTileBytes;
  static constexpr int kBytes = kPatternBytes + kOthers + 2 * KeyRing::kOtherBytes +
                                2 * QueryRing::kOtherBytes + TermsRing::kOtherBytes;
  static_assert(kBytes == kTile.bytes(kWidth));
};

// A weight of 0 that tells itself from one that is too small for a float.
constexpr float kHiddenWeight = -0.0f;
TK_DEVICE bool is_hidden_weight(float weight) { return __float_as_uint(weight) == 1u << 31; }

// Which keys a block of threads has.
struct KeyWork {
  int b, h_kv, n;  // n: number of the block of keys
};

// How many blocks of keys before these see something of a tile of queries. By a warp.
template <typename Shape>
TK_DEVICE int turn_of(const BackwardArguments& a, const Sequence& seq, int h, int i0, int n) {
  constexpr int kN = Shape::kN;
  const int i1 = min(i0 + Shape::kM, seq.M);
  const auto visible = [&](int other) {
    return tile_visible(a.params, seq, h, i0, i1, other * kN, (other + 1) * kN);
  };
  return Walk(key_blocks(seq, i0, i1, kN), visible).before(n);
}

// Tiles of queries that see some of these keys, of one head after the other.
template <typename Shape>
TK_DEVICE void load(const BackwardArguments& a, const Shape& shared, const KeyWork& work) {
  using Element = typename Shape::Element;
  constexpr int kM = Shape::kM, kN = Shape::kN;
  const BackwardParams& p = a.params;
  const Sequence seq = sequence_of(a, work.b);
  const int j0 = work.n * kN, j1 = j0 + kN, heads = static_cast<int>(p.H_q / p.H_kv);
  const bool packed = a.packing.cu_seqlens_q != nullptr;

  int h = work.h_kv * heads;
  const int last_h = h + heads - 1;
  const auto visible = [&](int m) {
    return tile_visible(p, seq, h, m * kM, min((m + 1) * kM, seq.M), j0, j1);
  };
  Walk walk(query_blocks(seq, j0, j1, kM), visible);
  const auto advance = [&] {
    Block block = walk.next();
    while (block.index < 0 && h < last_h) {
      ++h;
      walk.restart();
      block = walk.next();
    }
    return block;
  };
  Block block = advance();
  const typename Shape::KeyRing::At only;
  typename Shape::QueryRing::At at;

  // What nobody sees may be NaN, which gradients of 0 do not hide.
  const UsedKeys used = used_keys_of(a, seq);
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

// Of a warp's 16 keys: products become p, and do v, which may still be under way, da. i0 and j0 are
// those of the accumulators' first element.
template <typename Shape, int kN>
TK_DEVICE void differentiate(const BackwardArguments& a, const KeyWork& work, const Note& note,
                             const Terms<Shape::kM>& terms, int j0, Accumulator<1, kN>& s,
                             Accumulator<1, kN>& dp) {
  const BackwardParams& p = a.params;
  const bool plain = has_plain_scores<typename Shape::Element>(p.score);
  const float unit = plain ? static_cast<float>(p.score.scale) * kLog2E : kLog2E;
  const int i0 = note.index * Shape::kM;
  wait_product<1>(s);
  if (plain) {
    if (!note.full) hide<RowsAre::kKeys>(s, p, sequence_of(a, work.b), note.h, i0, j0);
    s.for_each([&](int, int column, float& x) {
      const bool hidden = !note.full && x == -INFINITY;
      x = exp2_approx(fmaf(x, unit, -terms.lse()[column]));
      if (hidden) x = kHiddenWeight;
    });
  }
  wait_product<0>(dp);
  dp.for_each([&](int, int column, float& x) { x -= terms.delta()[column]; });
  if (!plain) {
    const Sequence seq = sequence_of(a, work.b);
    const Scores scores = scores_of(p, seq, note.h);
    const auto weigh = [&](int row, int column, float& product, float& gradient) {
      const int i = i0 + column, j = j0 + row;
      const Score one = score(scores, product, i, j);
      const float weight = exp2_approx(fmaf(one.value, unit, -terms.lse()[column]));
      product = is_visible(p, seq, note.h, i, j) ? weight : kHiddenWeight;
      gradient *= one.derivative;
    };
    for_each_in_memory(weigh, s, dp);
  }
  for_each_element<1, kN>([&](int m, int n, int e) {
    // do may be NaN where nobody sees it.
    const bool hidden = !note.full && is_hidden_weight(s.x[m][n][e]);
    dp.x[m][n][e] = hidden ? 0.0f : s.x[m][n][e] * dp.x[m][n][e];
  });
}

// Adds a group's part of dq to the sums, by its first thread.
template <typename Shape>
TK_DEVICE void add_dq(const BackwardArguments& a, const Note& note, const float* from) {
  const int64_t part = int64_t{note.tile} * Shape::kGroups + group_index();
  if (a.turns) {
    while (load_acquire(a.turns + part) != note.turn) {
    }
    fence_async_global();
  }
  add_bulk(a.dq_sums + part * (kGroupThreads * 32), from, Shape::kDqBytes);
  commit_stores();
  if (a.turns) {
    wait_stores<0>();
    fence_async_global();
    add_release(a.turns + part, 1);
  }
}

// dk and dv of a group's keys, through the tiles where k and v were.
template <typename Shape, int kN>
TK_DEVICE void write(const BackwardArguments& a, const Shape& shared, const KeyWork& work,
                     Accumulator<1, kN>& dk, const Accumulator<1, kN>& dv) {
  using Element = typename Shape::Element;
  const BackwardParams& p = a.params;
  const Sequence seq = sequence_of(a, work.b);
  const float scale = static_cast<float>(p.score.scale);
  for_each_element<1, kN>([&](int m, int n, int e) { dk.x[m][n][e] *= scale; });
  const int row = uniform_group_index() * kGroupRows, j0 = work.n * Shape::kN + row;
  const auto dk_rows =
      result_of<Element>(a, a.dk, p.dk, seq.at, work.h_kv, seq.first_k, seq.N, p.D);
  const auto dv_rows =
      result_of<Element>(a, a.dv, p.dv, seq.at, work.h_kv, seq.first_k, seq.N, p.D_v);
  const typename Shape::KeyRing::At only;
  store(dk, dk_rows, j0, shared.k.tile(only), row);
  store(dv, dv_rows, j0, shared.v.tile(only), row);
  if (is_first_of_group()) wait_stores_read<0>();  // dq too
}

template <typename Shape>
TK_DEVICE void differentiate_keys(const BackwardArguments& a, const Shape& shared,
                                  const KeyWork& work) {
  using Element = typename Shape::Element;
  constexpr int kM = Shape::kM, kWidth = Shape::KeyRing::Tile::kWidth, kAll = 2 * kGroupThreads;
  const int group = uniform_group_index(), row = group * kGroupRows,
            warp_row = row + group_warp() * 16;
  const int j0 = work.n * Shape::kN;
  const typename Shape::KeyRing::At only;
  typename Shape::QueryRing::At at;
  const auto k = shared.k.tile(only), v = shared.v.tile(only);
  float* const dq_tile = shared.dq + group * (kGroupThreads * 32);
  const auto release = [](const auto& ring, const auto& place) {
    __syncwarp();  // all lanes have read what is not wgmma's
    if (lane_index() == 0) ring.release(place);
  };

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
    differentiate<Shape>(a, work, note, shared.terms.tile(at), j0 + warp_row, s, dp);
    release(shared.terms, at);
    Fragment<Element> weights[kM / 16], ds[kM / 16];
#pragma unroll
    for (int m = 0; m < kM / 16; ++m) {
      to_a(weights[m], s, 0, m);
      to_a(ds[m], dp, 0, m);
    }
    start_sum(dv, weights, shared.d_o.tile(at));
    stage(shared.ds, warp_row, [&](int m) { return ds[m]; });
    fence_async();
    if (is_first_of_group()) wait_stores_read<0>();
    named_barrier_sync(kAllGroups, kAll);  // ds is there, and dq before has left

    Accumulator<1, 8> dq;
    start_sum(dk, ds, shared.q.tile(at));
    start_turned(dq, shared.ds, kM == 64 ? 0 : row, k, kM == 64 ? row : 0);
    wait_product<0>(dv);
    wgmma_hold(numbers(dk));
    wgmma_hold(numbers(dq));
    release(shared.q, at);
    release(shared.d_o, at);
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      dq_tile[n * kGroupThreads + threadIdx.x % kGroupThreads] = numbers(dq)[n];
    }
    fence_async();
    named_barrier_sync(kAllGroups, kAll);  // dq is there, and ds is read
    if (is_first_of_group()) add_dq<Shape>(a, note, dq_tile);
    at.next();
  }

  write(a, shared, work, dk, dv);
}

template <typename Element, int kWidth>
TK_KERNEL(hopper_backward_tile(kWidth).threads(), 1)
backward_kernel(const __grid_constant__ BackwardArguments a) {
  using Shape = BackwardShape<Element, kWidth>;
  constexpr HopperBackwardTile kTile = Shape::kTile;
  TK_SHARED_MEMORY(memory);
  const Shape shared(memory + (-shared_address(memory) & (kPatternBytes - 1)));
  // Not where TMA writes, which would have to be told of it.
  auto* const number = reinterpret_cast<unsigned char*>(&shared.k.note({}));
  const int program = program_of(a.turns ? a.begun : nullptr, number);
  const int H_kv = static_cast<int>(a.params.H_kv);
  const KeyWork work{program / a.blocks / H_kv, program / a.blocks % H_kv, program % a.blocks};
  if (work.n * Shape::kN >= sequence_of(a, work.b).N) return;
  if (threadIdx.x == 0) {
    constexpr int kReaders = kTile.kGroups * kGroupWarps;
    shared.k.init(kReaders);
    shared.v.init(kReaders);
    shared.q.init(kReaders);
    shared.d_o.init(kReaders);
    shared.terms.init(kReaders);
    fence_mbarrier_init();
  }
  __syncthreads();

  if (threadIdx.x < kGroupThreads) {
    release_registers<kTile.loader_registers>();
    if (warp_index() == 0) load(a, shared, work);
  } else {
    request_registers<kTile.registers>();
    differentiate_keys(a, shared, work);
  }
}

// dq from its sums: a tile of queries of one head.
template <typename Element, int kWidth>
TK_KERNEL(hopper_backward_tile(kWidth).kGroups* kGroupThreads, 1)
query_gradients_kernel(const __grid_constant__ BackwardArguments a) {
  using Shape = BackwardShape<Element, kWidth>;
  constexpr int kM = Shape::kM, kGroups = Shape::kGroups;
  const BackwardParams& p = a.params;
  const int program = static_cast<int>(blockIdx.x), H_q = static_cast<int>(p.H_q);
  const int h = program / a.row_tiles % H_q, block = program % a.row_tiles;
  const Sequence seq = sequence_of(a, program / a.row_tiles / H_q);
  if (block * kM >= seq.M) return;
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  const float* const sums =
      a.dq_sums +
      (int64_t{tile_of<kM>(a, seq, h, block)} * kGroups + group) * (kGroupThreads * 32) +
      threadIdx.x % kGroupThreads;
  Accumulator<1, 8> dq;
#pragma unroll
  for (int n = 0; n < 32; ++n) numbers(dq)[n] = sums[n * kGroupThreads];
  const auto rows = rows_of<Element>(p.dq, seq.at, h, seq.first_q, p.D);
  const float scale = static_cast<float>(p.score.scale);
  const int row = block * kM + (kM == 64 ? 0 : group * 64) + group_warp() * 16;
  const int column = kM == 64 ? group * 64 : 0;
  dq.for_each_pair([&](int r, int c, float x, float y) {
    if (row + r < seq.M) rows.store_pair(row + r, column + c, x * scale, y * scale);
  });
}

}  // namespace tk::cuda::sm90
