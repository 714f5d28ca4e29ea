// Decay within a chunk: one gate for each token, or one for each token and channel of k.
//
// Channel gates: sub-blocks of kSub tokens. The decay from token j to token i of a later sub-block
// is the product of three: that after j in its own sub-block, those of the sub-blocks in between,
// and that up to i in its own. All three are at most 1. Within a sub-block every decay is the
// exponential of its own sum, so that small differences of large sums keep their bits.
#pragma once

#include "cpu/linear/decay.h"
#include "cpu/linear/features.h"
#include "cpu/linear/scan.h"

namespace tk::cpu::TK_ISA {

constexpr int64_t kSub = 16;

template <typename Real>
struct Gates {
  bool by_channel;
  int64_t width;  // padded D
  ChunkDecay<Real>* decay;
  // By token: (kChunk) and (1). By channel: (kChunk, width) and (width).
  Real* from_start;  // exp(c_i)
  Real* to_end;      // exp(c_C - c_i), C the last token
  Real* kept;        // exp(c_C)
  // By token: exp(c_i - c_j), 1 for j > i: (kChunk, kChunk).
  Real* between;
  // By channel, (kChunk, width) and (kChunk / kSub, width).
  Real* steps;  // log-decays, in units of log(2)
  Real* in;     // from the start of the sub-block to i
  Real* out;    // from i to the end of the sub-block
  Real* blocks;

  // Factors `table` of token r, for the channels c .. c + kLanes - 1.
  TK_INLINE_METHOD Vec<Real> factor(const Real* table, int64_t r, int64_t c) const {
    return by_channel ? load(table + r * width + c) : broadcast(table[r]);
  }
};

template <typename Real>
Gates<Real> make_gates(const DeltaProblem& p, int64_t width, Arena& arena) {
  const bool by_channel = p.gates > 1;
  const int64_t size = by_channel ? width : 1, channels = by_channel ? kChunk * width : 0;
  Gates<Real> g;
  g.by_channel = by_channel, g.width = width;
  g.decay = allocate<ChunkDecay<Real>>(arena, by_channel ? 0 : 1);
  g.from_start = allocate<Real>(arena, kChunk * size);
  g.to_end = allocate<Real>(arena, kChunk * size);
  g.kept = allocate<Real>(arena, size);
  g.between = allocate<Real>(arena, by_channel ? 0 : kChunk * kChunk);
  for (Real** x : {&g.steps, &g.in, &g.out}) *x = allocate<Real>(arena, channels);
  g.blocks = allocate<Real>(arena, channels / kSub);
  return g;
}

template <typename Real>
void fill_between(const Gates<Real>& g) {
  constexpr int64_t W = kLanes<Real>;
  for (int64_t i = 0; i < kChunk; ++i) {
    Real* const row = g.between + i * kChunk;
    for (int64_t j = 0; j < kChunk; j += W) {
      const auto is_later = iota<Real>() > static_cast<Real>(i - j);
      const Vec<Real> sum = g.decay->between(i, j);
      store(row + j, exp<Real>(is_later ? Vec<Real>{} : sum));
    }
  }
}

// The tables by channel, from `steps`.
template <typename Real>
void fill_channels(const Gates<Real>& g) {
  constexpr int64_t W = kLanes<Real>;
  for (int64_t c = 0; c < g.width; c += W) {
    Vec<Real> kept = broadcast(Real{1});
    for (int64_t first = 0; first < kChunk; first += kSub) {
      Vec<Real> sum{};
      for (int64_t i = first; i < first + kSub; ++i) {
        sum += load(g.steps + i * g.width + c);
        const Vec<Real> y = exp2<Real, Precision::kReal>(sum);
        store(g.in + i * g.width + c, y);
        store(g.from_start + i * g.width + c, y * kept);
      }
      const Vec<Real> block = exp2<Real, Precision::kReal>(sum);
      store(g.blocks + first / kSub * g.width + c, block);
      kept *= block;
      sum = Vec<Real>{};
      for (int64_t i = first + kSub; i-- > first;) {
        store(g.out + i * g.width + c, exp2<Real, Precision::kReal>(sum));
        sum += load(g.steps + i * g.width + c);
      }
    }
    store(g.kept + c, kept);
    kept = broadcast(Real{1});
    for (int64_t i = kChunk; i-- > 0;) {
      store(g.to_end + i * g.width + c, load(g.out + i * g.width + c) * kept);
      if (i % kSub == 0) kept *= load(g.blocks + i / kSub * g.width + c);
    }
  }
}

// Reads the log-decays of `rows` tokens from `row` on. Returns false if one is NaN.
template <typename Real>
bool read_gates(const DeltaProblem& p, const Sequence& one, int64_t h, int64_t row, int64_t rows,
                const Gates<Real>& g) {
  const auto* const data = static_cast<const Real*>(p.log_decay.data);
  const Real* const from = data + row_offset(p.log_decay, one.b, h, row);
  if (!g.by_channel) {
    g.decay->read(from, p.log_decay.stride[2], rows, [](int64_t) { return true; });
    std::copy_n(g.decay->from_start, kChunk, g.from_start);
    std::copy_n(g.decay->to_end, kChunk, g.to_end);
    *g.kept = g.from_start[kChunk - 1];
    fill_between(g);
    return g.decay->total == g.decay->total;
  }
  clear(g.steps, kChunk * g.width);
  for (int64_t r = 0; r < rows; ++r) {
    read_row(kDTypeOf<Real>, from, r * p.log_decay.stride[2], p.log_decay.stride[3], p.D,
             g.steps + r * g.width);
  }
  constexpr Real kSmallest = static_cast<Real>(kSmallestLogDecay<Real>);
  constexpr Real kLog2E = static_cast<Real>(1.4426950408889634);
  Vec<Real> sum{};  // NaN if a number is
  for (int64_t n = 0; n < kChunk * g.width; n += kLanes<Real>) {
    const Vec<Real> x = load(g.steps + n), smallest = broadcast(kSmallest);
    const Vec<Real> step = (x < kSmallest ? smallest : x) * kLog2E;
    store(g.steps + n, step);
    sum += step;
  }
  const bool is_number = !any<Real>(sum != sum);
  fill_channels(g);
  return is_number;
}

// to = rows times `table` times `factor`.
template <typename Real>
void scale_by(const Gates<Real>& g, const Real* table, Real factor, const Real* rows, Real* to) {
  for (int64_t r = 0; r < kChunk; ++r) {
    for (int64_t c = 0; c < g.width; c += kLanes<Real>) {
      const int64_t at = r * g.width + c;
      store(to + at, load(rows + at) * g.factor(table, r, c) * factor);
    }
  }
}

// Decays a state, of `width` x `columns`, over the chunk.
template <typename Real>
void decay_state(const Gates<Real>& g, int64_t columns, Real* S) {
  for (int64_t d = 0; d < g.width; ++d, S += columns) {
    const Real kept = g.kept[g.by_channel ? d : 0];
    for (int64_t c = 0; c < columns; ++c) S[c] *= kept;
  }
}

}  // namespace tk::cpu::TK_ISA
