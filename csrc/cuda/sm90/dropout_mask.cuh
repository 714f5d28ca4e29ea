// Which weights of a tile of the backward pass dropout keeps. Its rows are keys, and a random
// number's neighbours are of keys that lie 8 apart: those of all four warps of a group. So the
// warps that have nothing to load draw them, a tile ahead, and leave bits in shared memory.
#pragma once

#include "cuda/common/dropout.cuh"
#include "cuda/sm90/backward_preprocess.cuh"
#include "cuda/sm90/warpgroups.cuh"

namespace tk::cuda::sm90 {

constexpr int kDrawingWarps = kGroupWarps - 1;

// Bits of kN keys and kM queries. A byte is of the keys 8 t + r of 64 others, for one r and t = 0
// .. 7, and of one query; r runs slowest, and queries lie as a lane of an accumulator has them.
template <int kN, int kM>
struct KeptTile {
  static constexpr int kBytes = kN * kM / 8;
  unsigned char* data;

  TK_DEVICE_METHOD unsigned char* at(int key_group, int r, int query) const {
    const int lane = query % 8 / 2;
    return data + (key_group * 8 + r) * kM + lane * (kM / 4) + query / 8 * 2 + query % 2;
  }
};

// Those of a lane's part of an accumulator: 16 keys by 8 kN queries.
template <int kN>
struct KeptWeights {
  uint32_t bits[(kN + 7) / 8] = {};

  TK_DEVICE_METHOD bool operator()(int n, int e) const {
    const int byte = 2 * n + e % 2, word = byte / 4;
    return (bits[word / 4] >> (byte % 4 * 8 + word % 4 * 2 + e / 2) & 1) != 0;
  }
};

// Dropout as groups see it, and as those who draw.
template <typename Shape>
struct Drops {
  using KeptRing = Ring<KeptTile<Shape::kN, Shape::kM>, 1>;
  static constexpr int kBytes = KeptRing::kTileBytes + KeptRing::kOtherBytes;
  static constexpr int kReadersOfTerms = kDrawingWarps;

  KeptRing ring;
  typename KeptRing::At at;

  TK_DEVICE_METHOD explicit Drops(unsigned char* shared)
      : ring(shared, shared + KeptRing::kTileBytes) {}

  TK_DEVICE_METHOD void init() const { ring.init(Shape::kConsumers * kGroupWarps, kDrawingWarps); }

  // By every warp of every group, once for each tile of queries: of its 16 keys in 64 others,
  // number `key_group` of the block's, and 8 kN queries from `query` on.
  template <int kN>
  TK_DEVICE_METHOD KeptWeights<kN> next(int key_group, int query) {
    ring.wait_full(at);
    const int lane = lane_index();
    const auto* const from = reinterpret_cast<const uint32_t*>(
        ring.tile(at).at(key_group, lane / 4, query + lane % 4 * 2));
    KeptWeights<kN> kept;
#pragma unroll
    for (int word = 0; word < kN / 2; ++word) {
      kept.bits[word / 4] |= (from[word] >> 2 * group_warp() & 0x03030303u) << word % 4 * 2;
    }
    release(ring, at);
    at.next();
    return kept;
  }

  // By warps 1 to 3 of the block.
  TK_DEVICE_METHOD void draw(const BackwardArguments& a, const Shape& shared, const KeyWork& work) {
    constexpr int kM = Shape::kM, kThreads = kDrawingWarps * kWarp;
    const typename Shape::KeyRing::At only;
    typename Shape::TermsRing::At terms;
    shared.k.wait_full(only);
    bool last = shared.k.note(only).last;
    while (!last) {
      shared.terms.wait_full(terms);
      const Note note = shared.terms.note(terms);
      release(shared.terms, terms);
      last = note.last;
      ring.wait_empty(at);
#pragma unroll 1
      for (int n = static_cast<int>(threadIdx.x) - kWarp; n < Shape::kN / 8 * kM; n += kThreads) {
        const int r = n % 8, query = n / 8 % kM, key_group = n / 8 / kM;
        const int counter = (work.n * (Shape::kN / 64) + key_group) * 8 + r;
        *ring.tile(at).at(key_group, r, query) = static_cast<unsigned char>(
            kept_of(a.dropout, counter, note.index * kM + query, note.h, work.b));
      }
      __syncwarp();
      if (lane_index() == 0) mbarrier_arrive(ring.full(at));
      terms.next();
      at.next();
    }
  }
};

// All weights are kept.
template <typename Shape>
struct DropsNothing {
  static constexpr int kBytes = 0, kReadersOfTerms = 0;

  struct All {};

  TK_DEVICE_METHOD explicit DropsNothing(unsigned char*) {}
  TK_DEVICE_METHOD void init() const {}
  template <int>
  TK_DEVICE_METHOD All next(int, int) {
    return {};
  }
  TK_DEVICE_METHOD void draw(const BackwardArguments&, const Shape&, const KeyWork&) {}
};

}  // namespace tk::cuda::sm90
