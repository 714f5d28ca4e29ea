// Backward pass: dq, dk, dv. The scores are recomputed from lse; nothing of size M x N is stored.
//
//   for each chunk of queries, stripe of key blocks, and square of the stripe and the chunk:
//     p, ds = score_gradient            per block: keys x queries
//     dv += dropout(p) do,  dk += scale ds q,  dq^T += scale k^T ds
//
// Workers that share heads process the queries in phases of several chunks, which bounds the memory
// of packed operands and of dq: they pack a phase, compute its products, and write its dq while
// they pack the next one.
//
// A square is kSquare blocks wide, so that accumulators are read and written once for several
// products. Each split of the keys accumulates its own dq, and the splits are added in a fixed
// order: gradients do not depend on thread timing.
#pragma once

#include "cpu/attention/bias_gradient.h"
#include "cpu/attention/relative_gradient.h"
#include "cpu/attention/relative_keys_gradient.h"
#include "cpu/attention/score_gradient.h"
#include "cpu/engine/transpose_store.h"

namespace tk::cpu::TK_ISA {

// Multiplies ds of rows r and r + 16 by the derivatives of its scores (keys x kPass).
template <int64_t kPass, typename Real>
TK_INLINE void multiply_by_slope(const Real* slope, int64_t r, int64_t lane,
                                 Vec<Real> (&ds)[2][2]) {
  for (int half = 0; half < 2; ++half) {
    for (int n = 0; n < 2; ++n) {
      const int64_t column = lane % kPass + n * kLanes<Real>;
      ds[half][n] *= load(slope + (r + half * kKeyGroup / 2) * kPass + column);
    }
  }
}

// Zeroes the keys of t.ds that the block does not compute.
template <typename Engine>
void clear_rest(const BackwardScratch<Engine>& t, const Block& block) {
  const int64_t end = block.first + block.keys;
  clear(t.ds, block.first * kBlock);
  clear(t.ds + end * kBlock, (kBlock - end) * kBlock);
}

// Products that one tile of the square adds to the three gradients.
template <typename Engine>
struct TileTerms {
  using Product = typename Engine::Product;
  Block block;
  Product dq, dk, dv;
};

// Computes p and ds of one tile and returns its products. `tile` is its index within the square.
template <typename Engine>
TileTerms<Engine> backward_tile(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                                const BackwardScratch<Engine>& t, int64_t tile, int64_t slot,
                                int64_t n, int64_t m, const Block& block) {
  using Real = typename Engine::Real;
  using Scratch = BackwardScratch<Engine>;
  const auto number = static_cast<size_t>(tile);
  const typename Scratch::Weights weights(t.s, t.weights + number * Scratch::Weights::kBytes);
  const typename Scratch::Gradient gradient(t.dp, t.gradient + number * Scratch::Gradient::kBytes);
  const bool capped = is_capped(p);
  Real* const tile_of_ds = writes_ds(p) ? t.ds + block.first * kBlock : nullptr;
  Real* const diagonals = p.distance_sums ? t.diagonals : nullptr;
  Real* const ds_of_keys = w.distances ? t.dbands.ds : nullptr;
  if (tile_of_ds) clear_rest(t, block);
  if (diagonals) clear(diagonals, 2 * kBlock);
  score_gradient(p, w, t, slot, n, m, block,
                 [&](int64_t row, int64_t lane, const Vec<Real>(&weight)[2][2],
                     Vec<Real>(&ds)[2][2]) TK_INLINE_LAMBDA {
                   if (tile_of_ds) put_in_tile(row, lane, ds, tile_of_ds, WriteMode::kOverwrite);
                   if (diagonals) add_to_diagonals(row, lane, ds, diagonals);
                   if (capped) multiply_by_slope<Engine::kPass>(t.slope, row, lane, ds);
                   if (ds_of_keys) put_in_tile(row, lane, ds, ds_of_keys, WriteMode::kOverwrite);
                   weights.put(row, lane, weight);
                   gradient.put(row, lane, ds);
                 });
  const int64_t depth = round_up(block.queries, Engine::kDepthUnit);
  return {block,
          {Engine::left_t(w.k, w.k_panel(slot, n), block.first), gradient.right(), block.keys},
          {gradient.left(), Engine::right(w.q, w.q_panel(slot, m)), depth},
          {weights.left(), Engine::right(w.d_o, w.do_panel(slot, m)), depth}};
}

// The visible tiles of one row or column of the square.
template <typename Engine>
struct TileLine {
  const TileTerms<Engine>* tiles[Engine::kSquare];
  int count = 0;

  void add(const TileTerms<Engine>& tile) { tiles[count++] = &tile; }
};

// Accumulates dq of one block of queries.
template <typename Engine>
void add_to_dq(const BackwardWorkspace<Engine>& w, const TileLine<Engine>& line,
               typename Engine::Real* dq) {
  typename Engine::Product terms[Engine::kSquare];
  for (int n = 0; n < line.count; ++n) terms[n] = line.tiles[n]->dq;
  const int64_t queries = line.tiles[0]->block.computed_queries();
  Engine::template multiply<Accuracy::kReduced>(w.k.width, queries, terms, line.count, dq, kBlock,
                                                WriteMode::kAccumulate);
}

// Accumulates dk and dv of one block of keys. Tiles with the same range of computed keys share one
// call.
template <typename Engine>
void add_to_dk_dv(const BackwardWorkspace<Engine>& w, const TileLine<Engine>& line,
                  typename Engine::Real* dk, typename Engine::Real* dv) {
  typename Engine::Product dk_terms[Engine::kSquare], dv_terms[Engine::kSquare];
  for (int n = 0; n < line.count;) {
    const Block& block = line.tiles[n]->block;
    int count = 0;
    for (; n < line.count; ++n, ++count) {
      const TileTerms<Engine>& tile = *line.tiles[n];
      if (tile.block.first != block.first || tile.block.keys != block.keys) break;
      dk_terms[count] = tile.dk, dv_terms[count] = tile.dv;
    }
    Engine::template multiply<Accuracy::kReduced>(block.keys, w.v.width, dv_terms, count,
                                                  dv + block.first * w.v.width, w.v.width,
                                                  WriteMode::kAccumulate);
    Engine::template multiply<Accuracy::kReduced>(block.keys, w.k.width, dk_terms, count,
                                                  dk + block.first * w.k.width, w.k.width,
                                                  WriteMode::kAccumulate);
  }
}

// Key blocks n0 .. n1 - 1 of `head`, which counts over the batch.
struct Stripe {
  int64_t slot, head, n0, n1;

  int64_t first_key() const { return n0 * kBlock; }
  int64_t keys(int64_t N) const { return std::min(n1 * kBlock, N) - first_key(); }
};

// One square: key blocks n0 .. n1 - 1 against query blocks m0 .. m1 - 1. next_key[m - m0] is the
// key after the last tile of query block m.
template <typename Engine>
void backward_square(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                     const BackwardScratch<Engine>& t, const Stripe& at, int64_t m0, int64_t m1,
                     int64_t split, int64_t (&next_key)[Engine::kSquare]) {
  const auto [slot, head, n0, n1] = at;
  constexpr int64_t kSquare = Engine::kSquare;
  TileTerms<Engine> tiles[kSquare * kSquare];
  TileLine<Engine> rows[kSquare], columns[kSquare];
  for (int64_t m = m0; m < m1; ++m) {
    const int64_t h = w.query_head(p, head, m);
    for (int64_t n = n0; n < n1; ++n) {
      Block block = make_block(p, head / p.H_kv, h, m % w.head_blocks * kBlock, kBlock, n * kBlock);
      block.next_i = kSquare * kBlock;
      if (p.mask.selected) block.cursors = t.cursors + m % w.chunk;
      // The gradient of keys by distance reads groups of 32 queries.
      if (!w.distances) block.query_unit = Engine::kQueryUnit;
      const int64_t tile = (n - n0) * kSquare + m - m0;
      if (block.visible != Visible::kEmpty) {
        const int64_t last_key = std::exchange(next_key[m - m0], block.key(block.keys));
        block.continues = block.key(0) == last_key;
        if (w.distances && !block.continues) {
          end_key_gradients(p, w, t, slot, split, m, h, last_key);
        }
        tiles[tile] = backward_tile(p, w, t, tile, slot, n, m, block);
        if (p.distance_sums) add_tile_diagonals(p, w, t, slot, split, block);
        if (w.distances) add_key_gradients(p, w, t, slot, split, m, block);
        rows[n - n0].add(tiles[tile]);
        columns[m - m0].add(tiles[tile]);
      } else if (writes_ds(p)) {
        clear(t.ds, kBlock * kBlock);
      }
      if (writes_ds(p)) write_ds(p, block.b, block.h, block.i0, block.j0, t.ds);
    }
    if (columns[m - m0].count > 0) add_to_dq(w, columns[m - m0], w.dq_of(slot, split, m));
  }
  for (int64_t n = n0; n < n1; ++n) {
    const int64_t row = (slot * w.key_blocks + n) * kBlock;
    add_to_dk_dv(w, rows[n - n0], w.dk + row * w.k.width, w.dv + row * w.v.width);
  }
}

// One stripe of keys against query blocks m0 .. m1 - 1.
template <typename Engine>
void backward_stripe(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                     const BackwardScratch<Engine>& t, const Stripe& at, int64_t m0, int64_t m1,
                     int64_t split) {
  int64_t next_key[Engine::kSquare];
  std::fill(std::begin(next_key), std::end(next_key), -1);
  for (int64_t n0 = at.n0; n0 < at.n1; n0 += Engine::kSquare) {
    const int64_t n1 = std::min(n0 + Engine::kSquare, at.n1);
    backward_square(p, w, t, {at.slot, at.head, n0, n1}, m0, m1, split, next_key);
  }
  for (int64_t m = m0; w.distances && m < m1; ++m) {
    end_key_gradients(p, w, t, at.slot, split, m, w.query_head(p, at.head, m), next_key[m - m0]);
  }
}

// Writes rows of dk or dv, which are row-major with leading dimension `padded`.
template <typename Real>
void write_rows(DType dtype, const Strided& to, int64_t b, int64_t h, int64_t row0, int64_t rows,
                int64_t width, int64_t padded, Real factor, const Real* from) {
  if (width == padded && to.stride[3] == 1 && to.stride[2] == width) width *= rows, rows = 1;
  for (int64_t r = 0; r < rows; ++r, from += padded) {
    const int64_t offset = row_offset(to, b, h, row0 + r);
    write_row(from, width, factor, dtype, to.data, offset, to.stride[3]);
  }
}

// Zeroes rows of dk or dv, whose elements are contiguous: all-zero bits are 0 in every dtype.
TK_INLINE void clear_rows(DType dtype, const Strided& to, int64_t b, int64_t h, int64_t row0,
                          int64_t rows, int64_t width) {
  const int64_t size = size_of(dtype);
  for (int64_t r = row0; r < row0 + rows; ++r) {
    clear(static_cast<char*>(to.data) + row_offset(to, b, h, r) * size, width * size);
  }
}

// dk and dv are cleared just before their first product and written just after the last one, while
// they are in L2.
template <typename Engine>
void begin_stripe(const BackwardParams& p, const BackwardWorkspace<Engine>& w, const Stripe& at) {
  const int64_t row = at.slot * w.key_blocks * kBlock + at.first_key();
  const int64_t rows = at.keys(round_up(p.N, kKeyGroup));
  clear(w.dk + row * w.k.width, rows * w.k.width);
  clear(w.dv + row * w.v.width, rows * w.v.width);
}

template <typename Engine>
void end_stripe(const BackwardParams& p, const BackwardWorkspace<Engine>& w, const Stripe& at) {
  using Real = typename Engine::Real;
  const int64_t b = at.head / p.H_kv, h = at.head % p.H_kv, keys = at.keys(p.N);
  const int64_t row = at.slot * w.key_blocks * kBlock + at.first_key();
  write_rows(p.dtype, p.dk, b, h, at.first_key(), keys, p.D, w.k.width,
             static_cast<Real>(p.score.scale), w.dk + row * w.k.width);
  write_rows(p.dtype, p.dv, b, h, at.first_key(), keys, p.D_v, w.v.width, keep_factor<Real>(p),
             w.dv + row * w.v.width);
}

// Zero gradients, for keys that are fully masked.
TK_INLINE void write_zero_stripe(const BackwardParams& p, const Stripe& at) {
  const int64_t b = at.head / p.H_kv, h = at.head % p.H_kv;
  clear_rows(p.dtype, p.dk, b, h, at.first_key(), at.keys(p.N), p.D);
  clear_rows(p.dtype, p.dv, b, h, at.first_key(), at.keys(p.N), p.D_v);
}

// Query blocks m_begin .. m_end - 1 against one split of the keys: every `splits`-th stripe, which
// balances causal work. Calls begin_chunk(m0, m1) and end_chunk(m0, m1) around query blocks m0 ..
// m1 - 1.
template <typename Engine, typename BeginChunk, typename EndChunk>
void backward_split(const BackwardParams& p, const BackwardWorkspace<Engine>& w, int64_t worker,
                    int64_t slot, int64_t head, int64_t split, int64_t m_begin, int64_t m_end,
                    BeginChunk&& begin_chunk, EndChunk&& end_chunk) {
  constexpr int64_t kSquare = Engine::kSquare;
  [[maybe_unused]] const typename Engine::Session session;
  const BackwardScratch<Engine> t = scratch_of(p, w, worker);
  // The bias gradient must be written in fully masked blocks too, where it is zero.
  const bool all_blocks = writes_ds(p) && p.M > 0;
  const KeyInterval key_range =
      all_blocks ? KeyInterval{0, p.N} : visible_key_range(p, head / p.H_kv);
  const auto for_each_stripe = [&](bool visible, auto&& visit) {
    for (int64_t n0 = split * w.stripe; n0 < w.key_blocks; n0 += w.splits * w.stripe) {
      const int64_t n1 = std::min(n0 + w.stripe, w.key_blocks);
      if (overlaps(key_range, n0, n1 - n0) == visible) visit(Stripe{slot, head, n0, n1});
    }
  };
  if (m_begin == 0) {
    if (p.distance_sums) clear_diagonals(p, w, slot, split);
    if (p.key_sums) clear_key_gradients(p, w, slot, split);
    for_each_stripe(false, [&](const Stripe& at) { write_zero_stripe(p, at); });
  }
  for (int64_t begin = m_begin; begin < m_end; begin += w.chunk) {
    const int64_t end = std::min(begin + w.chunk, m_end);
    begin_chunk(begin, end);
    clear(w.dq_of(slot, split, begin), (end - begin) * kBlock * w.k.width);
    if (p.mask.selected) std::fill_n(t.cursors, end - begin, Cursors());
    for_each_stripe(true, [&](const Stripe& at) {
      const QueryInterval queries = all_blocks
                                        ? QueryInterval{0, p.M}
                                        : block_queries(p.mask, at.n0 * kBlock, at.n1 * kBlock);
      const auto [first, last] = w.block_span(queries);
      if (begin <= first && first < end) begin_stripe(p, w, at);
      for (int64_t m0 = begin; m0 < end; m0 += kSquare) {
        const int64_t m1 = std::min(m0 + kSquare, end);
        if (w.overlaps(queries, m0, m1)) backward_stripe(p, w, t, at, m0, m1, split);
      }
      if (begin <= last && last < end) end_stripe(p, w, at);
    });
    end_chunk(begin, end);
  }
  if (writes_ds(p)) end_streams();
}

// Sums dq over the splits and writes block m of the queries that share key head `head`.
template <typename Engine>
void write_dq(const BackwardParams& p, const BackwardWorkspace<Engine>& w, int64_t worker,
              int64_t slot, int64_t head, int64_t m) {
  using Real = typename Engine::Real;
  const int64_t i0 = m % w.head_blocks * kBlock;
  const int64_t h = w.query_head(p, head, m);
  Real* const dq = w.dq_of(slot, 0, m);
  for (int64_t split = 1; split < w.splits; ++split) {
    const Real* other = w.dq_of(slot, split, m);
    for (int64_t c = 0; c < kBlock * w.k.width; ++c) dq[c] += other[c];
  }
  Real scale[kBlock];
  for (Real& x : scale) x = static_cast<Real>(p.score.scale);
  write_transposed<kBlock>({p.dtype, p.dq, head / p.H_kv, h, i0, std::min(p.M - i0, kBlock), p.D},
                           dq, w.k.width, scale, scratch_of(p, w, worker).rows);
}

// Returns false if the input contains values that the engine cannot represent; the output is then
// invalid.
template <typename Engine>
bool backward(const BackwardParams& p, const Workers& workers, Arena arena) {
  const BackwardWorkspace<Engine> w = lay_out_backward<Engine>(p, workers.count, arena);
  const int64_t heads = p.B * p.H_kv;
  *w.finite = true;
  pack_all_distances<Engine>(p, w.distances, workers, w.finite,
                             [&](int64_t worker) { return scratch_of(p, w, worker).rows; });
  if (w.own_heads) {
    for_each(workers, heads, [&](int64_t worker, int64_t head) {
      for (int64_t n = 0; n < w.key_blocks; ++n) pack_keys_backward(p, w, worker, worker, head, n);
      backward_split(
          p, w, worker, worker, head, 0, 0, w.query_blocks,
          [&](int64_t m0, int64_t m1) {
            for (int64_t m = m0; m < m1; ++m) pack_queries_backward(p, w, worker, worker, head, m);
          },
          [&](int64_t m0, int64_t m1) {
            for (int64_t m = m0; m < m1; ++m) write_dq(p, w, worker, worker, head, m);
          });
      if (p.distance_sums) write_distance_sums(p, w, worker, head);
      if (p.key_sums) write_key_gradients(p, w, worker, head);
    });
    return *w.finite;
  }
  const auto for_each_block = [&](int64_t blocks, auto&& visit) {
    for_each(workers, heads * blocks,
             [&](int64_t worker, int64_t item) { visit(worker, item / blocks, item % blocks); });
  };
  // Writes dq of the phase before `begin`, and packs the one from it on, into the same memory. The
  // first call also packs the keys.
  const auto exchange = [&](int64_t begin) {
    const int64_t keys = begin == 0 ? w.key_blocks : 0;
    for_each_block(keys + w.query_capacity, [&](int64_t worker, int64_t head, int64_t item) {
      if (item < keys) return pack_keys_backward(p, w, worker, head, head, item);
      const int64_t m = begin + item - keys, done = m - w.query_capacity;
      if (0 <= done && done < w.query_blocks) write_dq(p, w, worker, head, head, done);
      if (m < w.query_blocks) pack_queries_backward(p, w, worker, head, head, m);
    });
  };
  int64_t begin = 0;
  exchange(begin);
  do {  // once without queries too, for the zeros of dk and dv
    if (!*w.finite) return false;
    const int64_t end = std::min(begin + w.query_capacity, w.query_blocks);
    for_each_block(w.splits, [&](int64_t worker, int64_t head, int64_t split) {
      const auto nothing = [](int64_t, int64_t) {};
      backward_split(p, w, worker, head, head, split, begin, end, nothing, nothing);
    });
    begin += w.query_capacity;
    exchange(begin);
  } while (begin < w.query_blocks);
  if (p.distance_sums) {
    for_each_block(1, [&](int64_t, int64_t n, int64_t) { write_distance_sums(p, w, n, n); });
  }
  if (p.key_sums) {
    for_each_block(1, [&](int64_t, int64_t n, int64_t) { write_key_gradients(p, w, n, n); });
  }
  if (p.dbias.data && !writes_ds(p)) bias_gradient(p, w, workers, arena);
  return true;
}

}  // namespace tk::cpu::TK_ISA
