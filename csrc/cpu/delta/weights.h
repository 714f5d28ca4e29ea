// The triangles of weights within a chunk, X_ij = G_ij k_i . k_j for j < i and P_ij = G_ij q_i .
// k_j for j <= i, where G_ij is the decay from token j to token i; and their gradients for q and k.
//
// Gates by token multiply products of the engine. Gates by channel enter the dot products: within a
// sub-block of kSub tokens element by element, between sub-blocks by rows of k that were decayed to
// the start of the later one.
#pragma once

#include "cpu/delta/gates.h"
#include "cpu/engine/fma.h"

namespace tk::cpu::TK_ISA {

// Triangles of a chunk, kChunk x kChunk; zero above the diagonal, X on it too.
template <typename Real>
struct Weights {
  Real *x, *p;
};

// Products times the decay and a factor, by token; only times the factor, by channel. Zero outside
// of the triangles. The first `count` rows and columns.
template <typename Real>
void mask_weights(const Gates<Real>& g, int64_t count, Weights<Real> products, Real x_factor,
                  Real p_factor, Weights<Real> to) {
  constexpr int64_t W = kLanes<Real>;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < count; j += W) {
      const int64_t at = i * kChunk + j;
      const Vec<Real> distance = broadcast(static_cast<Real>(i - j)) - iota<Real>();
      const Vec<Real> decay = g.by_channel ? broadcast(Real{1}) : load(g.between + at);
      const Vec<Real> x = load(products.x + at) * decay * x_factor;
      const Vec<Real> p = load(products.p + at) * decay * p_factor;
      store(to.x + at, distance > 0 ? x : Vec<Real>{});
      store(to.p + at, distance >= 0 ? p : Vec<Real>{});
    }
  }
}

// Rows of one head of q and k, padded; and the factors by which rows of k are decayed to the start
// of a sub-block.
template <typename Real>
struct ChannelRows {
  const Real *q, *k;
  Real* to_start;  // kChunk x width: of the sub-blocks before `block`
  Real* decayed;   // k times to_start
};

// Moves to_start from sub-block `block` - 1 to `block`, and decays k.
template <typename Real>
void advance_to_block(const Gates<Real>& g, const ChannelRows<Real>& rows, int64_t block) {
  const int64_t last = (block - 1) * kSub;
  for (int64_t c = 0; c < g.width; c += kLanes<Real>) {
    const Vec<Real> passed = load(g.blocks + (block - 1) * g.width + c);
    for (int64_t j = 0; j < last + kSub; ++j) {
      const int64_t at = j * g.width + c;
      const Vec<Real> factor = j < last ? load(rows.to_start + at) * passed : load(g.out + at);
      store(rows.to_start + at, factor);
      store(rows.decayed + at, load(rows.k + at) * factor);
    }
  }
}

// Weights of tokens i with the tokens j .. of an earlier sub-block, kLanes at a time.
template <typename Real>
void multiply_channels(const Gates<Real>& g, const ChannelRows<Real>& rows, int64_t i,
                       int64_t columns, Weights<Real> w) {
  constexpr int64_t W = kLanes<Real>;
  for (int64_t j = 0; j < columns; j += W) {
    Vec<Real> x[W] = {}, p[W] = {};
    for (int64_t c = 0; c < g.width; c += W) {
      const Vec<Real> in = load(g.in + i * g.width + c);
      const Vec<Real> k = load(rows.k + i * g.width + c) * in;
      const Vec<Real> q = load(rows.q + i * g.width + c) * in;
#pragma GCC unroll 16
      for (int64_t n = 0; n < W; ++n) {
        const Vec<Real> decayed = load(rows.decayed + (j + n) * g.width + c);
        x[n] += k * decayed;
        p[n] += q * decayed;
      }
    }
    store(w.x + i * kChunk + j, row_sums<Real>(x));
    store(w.p + i * kChunk + j, row_sums<Real>(p));
  }
}

// Column j of the weights within its sub-block, from token j on.
template <typename Real>
void multiply_within(const Gates<Real>& g, const ChannelRows<Real>& rows, int64_t j,
                     Weights<Real> w) {
  constexpr int64_t W = kLanes<Real>;
  const int64_t first = j / kSub * kSub, begin = j - first;
  Vec<Real> x[kSub] = {}, p[kSub] = {};
  for (int64_t c = 0; c < g.width; c += W) {
    const Vec<Real> k = load(rows.k + j * g.width + c);
    Vec<Real> sum{};
    for (int64_t n = begin; n < kSub; ++n) {
      const int64_t at = (first + n) * g.width + c;
      if (n > begin) sum += load(g.steps + at);
      const Vec<Real> decayed = n > begin ? k * exp2<Real, Precision::kReal>(sum) : k;
      x[n] += load(rows.k + at) * decayed;
      p[n] += load(rows.q + at) * decayed;
    }
  }
  for (int64_t n = 0; n < kSub; n += W) {
    const Vec<Real> x_sums = row_sums<Real>(x + n), p_sums = row_sums<Real>(p + n);
    for (int64_t lane = 0; lane < W; ++lane) {
      w.x[(first + n + lane) * kChunk + j] = x_sums[lane];
      w.p[(first + n + lane) * kChunk + j] = p_sums[lane];
    }
  }
}

// The weights by channel of `count` tokens, before mask_weights().
template <typename Real>
void weigh_channels(const Gates<Real>& g, const ChannelRows<Real>& rows, int64_t count,
                    Weights<Real> w) {
  for (int64_t block = 0; block < count / kSub; ++block) {
    const int64_t first = block * kSub;
    if (block > 0) advance_to_block(g, rows, block);
    for (int64_t n = first; n < first + kSub; ++n) {
      multiply_channels(g, rows, n, first, w);
      multiply_within(g, rows, n, w);
    }
  }
}

// Gradients of a head: of q, and of k as the row and as the column of a weight.
template <typename Real>
struct RowGradients {
  Real *q, *k_row, *k_column;
};

// Adds those of the weights of token j with the tokens of its sub-block; w are the gradients.
template <typename Real>
void add_within(const Gates<Real>& g, const ChannelRows<Real>& rows, int64_t j, Weights<Real> w,
                const RowGradients<Real>& to) {
  const int64_t end = j / kSub * kSub + kSub;
  for (int64_t c = 0; c < g.width; c += kLanes<Real>) {
    const Vec<Real> k = load(rows.k + j * g.width + c);
    Vec<Real> sum{}, column{};
    for (int64_t i = j; i < end; ++i) {
      const int64_t at = i * g.width + c;
      if (i > j) sum += load(g.steps + at);
      const Vec<Real> decay = i > j ? exp2<Real, Precision::kReal>(sum) : broadcast(Real{1}),
                      decayed = k * decay;
      const Real x = w.x[i * kChunk + j], p = w.p[i * kChunk + j];
      store(to.q + at, load(to.q + at) + p * decayed);
      store(to.k_row + at, load(to.k_row + at) + x * decayed);
      column += (load(rows.q + at) * p + load(rows.k + at) * x) * decay;
    }
    store(to.k_column + j * g.width + c, load(to.k_column + j * g.width + c) + column);
  }
}

// Adds those of the weights of tokens of sub-block `block` with all earlier ones. scratch: kSub x
// width, and kChunk x width.
template <typename Real>
void add_between(const Gates<Real>& g, const ChannelRows<Real>& rows, int64_t block,
                 Weights<Real> w, const RowGradients<Real>& to, Real* own, Real* columns) {
  constexpr auto kOverwrite = WriteMode::kOverwrite, kAccumulate = WriteMode::kAccumulate;
  const int64_t first = block * kSub, width = g.width;
  const auto rows_of = [&](const Real* weights, Real* gradient) {
    multiply_columns<Real>(kSub, width, FmaLeft<Real>{weights + first * kChunk, kChunk, 1},
                           rows.decayed, width, own, width, first, kOverwrite);
    for (int64_t n = 0; n < kSub * width; ++n) {
      gradient[first * width + n] += own[n] * g.in[first * width + n];
    }
  };
  const auto columns_of = [&](const Real* weights, const Real* x, WriteMode mode) {
    for (int64_t n = 0; n < kSub * width; ++n) {
      own[n] = x[first * width + n] * g.in[first * width + n];
    }
    multiply_columns<Real>(first, width, FmaLeft<Real>{weights + first * kChunk, 1, kChunk}, own,
                           width, columns, width, kSub, mode);
  };
  rows_of(w.p, to.q);
  rows_of(w.x, to.k_row);
  columns_of(w.p, rows.q, kOverwrite);
  columns_of(w.x, rows.k, kAccumulate);
  for (int64_t n = 0; n < first * width; ++n) to.k_column[n] += columns[n] * rows.to_start[n];
}

// Adds the gradients of all weights of `count` tokens, by channel. w: their gradients, masked.
template <typename Real>
void add_channel_gradients(const Gates<Real>& g, const ChannelRows<Real>& rows, int64_t count,
                           Weights<Real> w, const RowGradients<Real>& to, Real* own,
                           Real* columns) {
  for (int64_t block = 0; block < count / kSub; ++block) {
    if (block > 0) {
      advance_to_block(g, rows, block);
      add_between(g, rows, block, w, to, own, columns);
    }
    for (int64_t n = 0; n < kSub; ++n) add_within(g, rows, block * kSub + n, w, to);
  }
}

}  // namespace tk::cpu::TK_ISA
