// Gradients of and by the keys by distance (relative_keys.h). ds of a group of queries is turned
// and shifted back to its band of distances, dg_le = ds_jl:
//
//   dq^T += x^T dg^T,   dx += dg^T q
//
// Like dq, dx has sums of its own for each split, which are added in order.
#pragma once

#include <span>

#include "cpu/attention/backward_workspace.h"

namespace tk::cpu::TK_ISA {

// Turns ds (keys x kBlock) of a group of queries to the rows of dg, each shifted to its distances.
template <typename Real>
void turn_to_band(const Real* ds, int64_t keys, Real* dg) {
  constexpr int64_t W = kLanes<Real>;
  for (int64_t l = 0; l < kKeyGroup; l += W) {
    for (int64_t r = 0; r < keys; r += W) {
      Vec<Real> square[W];
#pragma GCC unroll 16
      for (int64_t n = 0; n < W; ++n) square[n] = load(ds + (r + n) * kBlock + l);
      transpose<Real>(square);
#pragma GCC unroll 16
      for (int64_t n = 0; n < W; ++n) {
        store(dg + (l + n) * kBand + kKeyGroup - 1 - (l + n) + r, square[n]);
      }
    }
  }
}

// Queries i0 .. i0 + kKeyGroup - 1 of head h: those from `lane` on of query block m.
struct QueryGroup {
  int64_t slot, split, m, h, i0, lane;
};

// Adds the products of the first `panels` panels of dg, the band of these queries and keys from j0
// on, to dq and dx.
template <typename Engine>
void multiply_band(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                   const BackwardScratch<Engine>& t, const QueryGroup& at, int64_t j0,
                   int64_t panels, const typename Engine::Real* dg) {
  using Product = typename Engine::Product;
  constexpr int64_t kMostPanels = kBand / kKeyGroup;
  const DistancePanels& x = w.distances;
  const PanelLayout layout = band_layout<Engine>();
  const char* const panel = t.dbands.panel;
  const int64_t first = x.first_panel(at.i0, j0);
  Engine::pack(layout, dg, kBand, t.dbands.panel);
  Product terms[kMostPanels];
  for (int64_t n = 0; n < panels; ++n) {
    terms[n] = {Engine::left_t(x.layout, x.panel(at.h, first + n), 0),
                Engine::from_depth(Engine::right_t(layout, panel, 0), n * kKeyGroup), kKeyGroup};
  }
  Engine::template multiply<Accuracy::kReduced>(
      w.k.width, kKeyGroup, terms, static_cast<int>(panels),
      w.dq_of(at.slot, at.split, at.m) + at.lane, kBlock, WriteMode::kAccumulate);
  if (!p.key_sums) return;
  const Product dx{Engine::left_t(layout, panel, 0),
                   Engine::from_depth(Engine::right(w.q, w.q_panel(at.slot, at.m)), at.lane),
                   kKeyGroup};
  Engine::template multiply<Accuracy::kReduced>(
      panels * kKeyGroup, w.q.width, &dx, 1,
      w.dkeys_of(at.slot, at.split, at.h % (p.H_q / p.H_kv)) + first * kKeyGroup * w.q.width,
      w.q.width, WriteMode::kAccumulate);
}

// Adds the gradients of one tile, whose ds is in t.dbands, except for the last panels of its bands.
template <typename Engine>
void add_key_gradients(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                       const BackwardScratch<Engine>& t, int64_t slot, int64_t split, int64_t m,
                       const Block& block) {
  for (int64_t lane = 0; lane < block.queries; lane += kKeyGroup) {
    auto* const dg = Engine::unpack_to(band_layout<Engine>(), t.dbands.panel, t.dbands.dg);
    auto* const carry = t.carry_of(m, lane);
    clear(dg, kKeyGroup * kBand);
    if (block.continues) copy_square(carry, kKeyGroup, dg, kBand);
    turn_to_band(t.dbands.ds + lane, block.keys, dg);
    copy_square(dg + block.keys, kBand, carry, kKeyGroup);
    multiply_band(p, w, t, {slot, split, m, block.h, block.i0 + lane, lane}, block.key(0),
                  block.keys / kKeyGroup, dg);
  }
}

// Adds the last panels of the bands of query block m, whose next key, -1 before any, is `next_key`.
template <typename Engine>
void end_key_gradients(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                       const BackwardScratch<Engine>& t, int64_t slot, int64_t split, int64_t m,
                       int64_t h, int64_t next_key) {
  if (next_key < 0) return;
  const int64_t i0 = m % w.head_blocks * kBlock, queries = std::min(p.M - i0, kBlock);
  for (int64_t lane = 0; lane < queries; lane += kKeyGroup) {
    auto* const dg = Engine::unpack_to(band_layout<Engine>(), t.dbands.panel, t.dbands.dg);
    copy_square(t.carry_of(m, lane), kKeyGroup, dg, kBand);
    multiply_band(p, w, t, {slot, split, m, h, i0 + lane, lane}, next_key, 1, dg);
  }
}

template <typename Engine>
void clear_key_gradients(const BackwardParams& p, const BackwardWorkspace<Engine>& w, int64_t slot,
                         int64_t split) {
  clear(w.dkeys_of(slot, split, 0), p.H_q / p.H_kv * w.dkeys_size());
}

// Writes the gradients of the query heads that share key head `head`, in ascending order of the
// distance.
template <typename Engine>
void write_key_gradients(const BackwardParams& p, const BackwardWorkspace<Engine>& w, int64_t slot,
                         int64_t head) {
  using Real = typename Engine::Real;
  const int64_t group = p.H_q / p.H_kv, distances = p.M + p.N - 1, width = w.q.width;
  const Real scale = static_cast<Real>(p.score.scale);
  Real* to = static_cast<Real*>(p.key_sums) + head * group * distances * p.D;
  for (int64_t h = 0; h < group; ++h) {
    for (int64_t n = 0; n < distances; ++n, to += p.D) {
      const int64_t row = (p.N - 1 + w.distances.shift - n) * width;
      for (int64_t c = 0; c < p.D; ++c) to[c] = 0;
      for (int64_t split = 0; split < w.splits; ++split) {
        const Real* const from = w.dkeys_of(slot, split, h) + row;
        for (int64_t c = 0; c < p.D; ++c) to[c] += scale * from[c];
      }
    }
  }
}

// Writes entries first .. last - 1 of row `row` of drelative_keys: the sum over sequences in their
// order, and over heads if they share the keys. The distances of a sequence are a part of the
// call's.
template <typename Real>
void sum_key_rows(const BackwardParams& call, std::span<const BackwardParams> sequences,
                  int64_t row, int64_t first, int64_t last) {
  constexpr int64_t kColumns = 64;
  const bool is_shared = call.score.relative_keys_stride == 0;
  for (int64_t e = first; e < last; ++e) {
    for (int64_t c0 = 0; c0 < call.D; c0 += kColumns) {
      const int64_t columns = std::min(call.D - c0, kColumns);
      double total[kColumns] = {};
      for (const BackwardParams& p : sequences) {
        const int64_t count = p.M + p.N - 1, n = e - p.score.relative_offset + p.N - 1;
        if (!p.key_sums || n < 0 || n >= count) continue;
        for (int64_t h = is_shared ? 0 : row; h < p.B * p.H_q; h += is_shared ? 1 : p.H_q) {
          const Real* from = static_cast<const Real*>(p.key_sums) + (h * count + n) * p.D + c0;
          for (int64_t c = 0; c < columns; ++c) total[c] += static_cast<double>(from[c]);
        }
      }
      write_row(total, columns, 1.0, call.dtype, call.drelative_keys,
                (row * call.score.distances + e) * call.D + c0, 1);
    }
  }
}

// Writes drelative_keys from the sums of the call's sequences.
TK_INLINE void sum_key_gradients(const BackwardParams& call,
                                 std::span<const BackwardParams> sequences,
                                 const Workers& workers) {
  constexpr int64_t kRows = 64;
  const int64_t distances = call.score.distances, blocks = round_up(distances, kRows) / kRows;
  const int64_t rows = call.score.relative_keys_stride == 0 ? 1 : call.H_q;
  for_each(workers, rows * blocks, [&](int64_t, int64_t item) {
    const int64_t first = item % blocks * kRows, last = std::min(first + kRows, distances);
    call.dtype == DType::kFloat64
        ? sum_key_rows<double>(call, sequences, item / blocks, first, last)
        : sum_key_rows<float>(call, sequences, item / blocks, first, last);
  });
}

}  // namespace tk::cpu::TK_ISA
