// Forward pass: a CTA owns block_m queries of one head and iterates over the key blocks they see.
//
//   s = q k^T          score options; -inf where hidden
//   m' = max(m, max s), p = 2^(s - m'), l = l 2^(m - m') + sum p
//   o = o 2^(m - m') + z p v
//   o / l, lse = m + log l
//
// With relative keys s has their products too (relative_keys.cuh).
//
// Shared memory holds one tile of k and one of v. v is copied during q k^T, the next k during p v,
// with two barriers per iteration. docs/attention.md, sections 2 and 5.
#pragma once

#include "cuda/common/dropout.cuh"
#include "cuda/common/masks.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/sm80/relative_keys.cuh"

namespace tk::cuda {

template <typename Element, int kWidth, Products kProducts>
constexpr ForwardTile kForwardTile = forward_tile(kProducts, kArch, sizeof(Element), kWidth);

template <typename Element, int kWidth, Products kProducts>
TK_KERNEL((kForwardTile<Element, kWidth, kProducts>.threads()), 1)
forward_kernel(const __grid_constant__ Arguments<ForwardParams> a) {
  constexpr ForwardTile kTile = kForwardTile<Element, kWidth, kProducts>;
  constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kThreads = kTile.warps * kWarp;
  constexpr int kRows = kBlockM / kTile.warps;  // rows per warp
  constexpr bool kRelative = kProducts == Products::kRelative;
  static_assert(kRows % 16 == 0 && kBlockN % 16 == 0);

  const ForwardParams& p = a.params;
  const int H_q = static_cast<int>(p.H_q), blocks = a.blocks;
  const int head = static_cast<int>(blockIdx.x) / blocks, h = head % H_q;
  const int h_kv = h / (H_q / static_cast<int>(p.H_kv));
  const int from_last = static_cast<int>(blockIdx.x) % blocks;  // longest rows first if causal
  const auto [b, row_block] =
      sequence_tile<kBlockM>(a.varlen.cu_seqlens_q, a.varlen.B, head / H_q, blocks - 1 - from_last);
  const Sequence seq = sequence_of(a, b);
  const int i0 = row_block * kBlockM;
  if (i0 >= seq.M) return;
  const int i1 = min(i0 + kBlockM, seq.M);

  TK_SHARED_MEMORY(memory);
  const SharedTile<Element, kBlockM, kWidth> q_tile{reinterpret_cast<Element*>(memory)};
  const SharedTile<Element, kBlockN, kWidth> k_tile{q_tile.data + kBlockM * kWidth};
  const SharedTile<Element, kBlockN, kWidth> v_tile{k_tile.data + kBlockN * kWidth};
  const Band<Element, kBlockM, kBlockN, kWidth> band{v_tile.data + kBlockN * kWidth};
  const auto q = rows_of<const Element>(p.q, seq.at, h, seq.first_q, p.D);
  const auto k = rows_of<const Element>(p.k, seq.at, h_kv, seq.first_k, p.D);
  const auto v = rows_of<const Element>(p.v, seq.at, h_kv, seq.first_k, p.D_v);
  const LiveKeys live = live_keys_of(a, seq, h_kv);
  const auto distances = relative_keys_of<Element>(a, seq, h);
  const bool plain = a.score.plain;
  const float scale = a.score.scale;
  const float unit = plain ? scale * kLog2E : kLog2E;  // converts scores to powers of 2
  const PhiloxHead numbers = philox_head(a.dropout, seq.b, h);

  const auto visible = [&](int n) {
    return tile_visible(p, seq, h, i0, i1, n * kBlockN, (n + 1) * kBlockN);
  };
  const auto start_keys = [&](const Block& block) {
    const int j0 = block.index * kBlockN;
    start_load<kThreads>(k_tile, k, j0, block.full, live);
    if constexpr (kRelative) band.template start_load<kThreads>(distances, i0, j0);
  };
  BlockIterator iterator(key_blocks(seq, i0, i1, kBlockN), visible);
  Block block = iterator.next();
  if (block.index >= 0) {
    start_load<kThreads>(q_tile, q, i0, i0 + kBlockM <= seq.M, [&](int i) { return i < seq.M; });
    start_keys(block);
  }

  const int row = warp_index() * kRows;
  Accumulator<kRows / 16, kWidth / 8> o;
  SoftmaxState<kRows / 16> softmax;
  o.clear();
  softmax.clear();
  while (block.index >= 0) {
    const int j0 = block.index * kBlockN;
    wait_copies<0>();
    __syncthreads();  // k has arrived; the previous v has been read
    start_load<kThreads>(v_tile, v, j0, block.full, live);
    Accumulator<kRows / 16, kBlockN / 8> s;
    s.clear();
    if constexpr (kRelative) band.template multiply<kBlockN>(q_tile, row, 0);
    add_product<Major::kK, Major::kK, kWidth>(s, q_tile, row, k_tile, 0);
    if constexpr (kRelative) band.add_products(s);

    wait_copies<0>();
    __syncthreads();  // v has arrived; k has been read
    const Block next = iterator.next();
    if (next.index >= 0) start_keys(next);
    if (!plain) apply(s, a, seq, h, i0 + row, j0);
    if (!block.full) apply_mask(s, p, seq, h, i0 + row, j0);
    softmax.template update<Element>(s, o, unit);
    if (a.dropout.seed) drop(s, a.dropout, numbers, i0 + row, j0);
    add_product<Major::kMN>(o, s, v_tile);
    block = next;
  }

  const auto o_rows = rows_of<Element>(p.o, seq.at, h, seq.first_q, p.D_v);
  const int64_t statistics = statistics_offset(p, seq, h);
  softmax.finish(a.dropout.factor, plain ? scale : 1.0f,
                 [&](int k, int half, float share, const LogSumExp& lse) {
                   const int i = i0 + row + 16 * k + row_of(2 * half);
                   if (i >= seq.M) return;
                   o.for_each_pair_of(k, half, [&](int column, float first, float second) {
                     o_rows.store_pair(i, column, first * share, second * share);
                   });
                   if (lane_index() % 4 == 0) store_lse(p, statistics + i, lse);
                 });
}

}  // namespace tk::cuda
