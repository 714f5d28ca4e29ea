// The backward pass on Hopper: a block takes some keys of one key head, and one warp loads the
// queries that see them, of every query head that shares it. Two warpgroups compute, and share the
// work by rows or by columns of dk and dv. dq is added to sums in float32; a kernel of its own
// brings those into place. In deterministic mode blocks of keys add in their order, as in
// sm80/backward.cuh. docs/hopper.md.
#pragma once

#include "cuda/sm90/backward_by_columns.cuh"
#include "cuda/sm90/backward_by_rows.cuh"

namespace tk::cuda::sm90 {

// With `Shape`'s differentiate_keys.
template <typename Element, int kWidth, int kVWidth>
using BackwardShape = std::conditional_t<kWidth <= 128, ShapeByRows<Element, kWidth>,
                                         ShapeByColumns<Element, kWidth, kVWidth>>;

template <typename Shape, typename Drops>
TK_DEVICE void backward(const BackwardArguments& a, unsigned char* memory) {
  constexpr HopperBackwardTile kTile = Shape::kTile;
  memory += -shared_address(memory) & (kPatternBytes - 1);
  const Shape shared(memory);
  Drops drops(memory + Shape::kBytes - kPatternBytes);
  // Not where TMA writes, which would have to be told of it.
  auto* const number = reinterpret_cast<unsigned char*>(&shared.k.note({}));
  const int program = program_of(a.turns ? a.begun : nullptr, number);
  const int H_kv = static_cast<int>(a.params.H_kv);
  const KeyWork work{program / a.blocks / H_kv, program / a.blocks % H_kv, program % a.blocks};
  if (work.n * Shape::kN >= sequence_of(a, work.b).N) return;
  if (threadIdx.x == 0) {
    constexpr int kReaders = kTile.kConsumers * kGroupWarps;
    shared.k.init(kReaders);
    shared.v.init(kReaders);
    shared.q.init(kReaders);
    shared.d_o.init(kReaders);
    shared.terms.init(kReaders + Drops::kReadersOfTerms);
    drops.init();
    fence_mbarrier_init();
  }
  __syncthreads();

  if (threadIdx.x < kGroupThreads) {
    release_registers<kTile.producer_registers>();
    if (warp_index() == 0) {
      load(a, shared, work);
    } else {
      drops.draw(a, shared, work);
    }
  } else {
    request_registers<kTile.registers>();
    differentiate_keys(a, shared, work, drops);
  }
}

template <typename Element, int kWidth, int kVWidth>
TK_KERNEL(hopper_backward_tile(kWidth).threads(), 1)
backward_kernel(const __grid_constant__ BackwardArguments a) {
  using Shape = BackwardShape<Element, kWidth, kVWidth>;
  TK_SHARED_MEMORY(memory);
  backward<Shape, DropsNothing<Shape>>(a, memory);
}

// With dropout: a kernel of its own, because a branch would cost registers where there is none.
template <typename Element, int kWidth, int kVWidth>
TK_KERNEL(hopper_backward_tile(kWidth).threads(), 1)
dropout_backward_kernel(const __grid_constant__ BackwardArguments a) {
  using Shape = BackwardShape<Element, kWidth, kVWidth>;
  TK_SHARED_MEMORY(memory);
  backward<Shape, Drops<Shape>>(a, memory);
}

// dq from its sums: a tile of queries of one head.
template <typename Element, int kWidth, int kVWidth>
TK_KERNEL(hopper_backward_tile(kWidth).kConsumers* kGroupThreads, 1)
dq_postprocess_kernel(const __grid_constant__ BackwardArguments a) {
  using Shape = BackwardShape<Element, kWidth, kVWidth>;
  constexpr int kM = Shape::kM;
  const BackwardParams& p = a.params;
  const int program = static_cast<int>(blockIdx.x), H_q = static_cast<int>(p.H_q);
  const int h = program / a.row_tiles % H_q, block = program % a.row_tiles;
  const Sequence seq = sequence_of(a, program / a.row_tiles / H_q);
  if (block * kM >= seq.M) return;
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  const int64_t part = int64_t{tile_of<kM>(a, seq, h, block)} * Shape::kConsumers + group;
  const float* const sums = a.dq_sums + part * Shape::kDqNumbers;
  Accumulator<1, Shape::kDqColumns / 8> dq;
#pragma unroll
  for (int n = 0; n < Shape::kDqColumns / 8; ++n) {
    const float4 x = *reinterpret_cast<const float4*>(sums + offset_of_four(n));
    dq.x[0][n][0] = x.x, dq.x[0][n][1] = x.y, dq.x[0][n][2] = x.z, dq.x[0][n][3] = x.w;
  }
  const auto rows = rows_of<Element>(p.dq, seq.at, h, seq.first_q, p.D);
  const float scale = static_cast<float>(p.score.scale);
  const int row = block * kM + Shape::dq_row(group) + group_warp() * 16;
  const int column = Shape::dq_column(group);
  dq.for_each_pair([&](int r, int c, float x, float y) {
    if (row + r < seq.M) rows.store_pair(row + r, column + c, x * scale, y * scale);
  });
}

}  // namespace tk::cuda::sm90
