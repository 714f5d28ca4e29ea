// The depthwise causal convolution. With h = W - 1 and x' = [state, x] (h + T tokens), per channel:
//
//   u_t       = bias + sum_w weight_w x'_{t + w}
//   y_t       = u_t, or silu(u_t) = u_t sigmoid(u_t)
//   du_t      = dy_t, or dy_t silu'(u_t); 0 outside of 0 .. T - 1
//   dx'_s     = sum_w weight_w du_{s - w}, and the gradient of the final state for s >= T
//   dweight_w = sum_t du_t x'_{t + w}
//   dbias     = sum_t du_t
//
// The final state is the last h tokens of x'. A work item is a block of channels of a part of all
// tiles; tiles that are neighbours read the same h tokens, and recompute du of those.
#pragma once

#include "cpu/conv/tile.h"
#include "cpu/engine/workers.h"

namespace tk::cpu::TK_ISA {

constexpr int64_t kItemsPerWorker = 4;

template <typename Real>
TK_INLINE Vec<Real> sigmoid(Vec<Real> x) {
  return Real{1} / (Real{1} + exp<Real>(-x));
}

// Scratch of a worker.
template <typename Real>
struct ConvScratch {
  Real *x, *other;  // tiles: x', and y or du
  Real* weights;    // (W + 1, channels of a tile)
};

// Work items and memory of a call.
template <typename Real>
struct ConvPlan {
  int64_t blocks;  // of channels
  int64_t tiles;   // of all sequences, for each block
  int64_t parts;   // work items of each block
  ConvScratch<Real>* scratch;
  Real* sums;  // (blocks, parts, W + 1, channels of a tile): gradients of the weights
};

TK_INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// All tokens of sequence b.
TK_INLINE Tokens sequence_of(const ConvProblem& p, int64_t b) {
  if (!p.cu_seqlens) return {b, b, 0, p.T, 0, p.T};
  const int64_t start = p.cu_seqlens[b], T = p.cu_seqlens[b + 1] - start;
  return {b, 0, start, T, 0, T};
}

// A sequence without tokens has a tile too, which copies the state.
template <Axis kAxis, typename Real>
int64_t tiles_of(const Tokens& sequence) {
  return std::max<int64_t>(divide_up(sequence.T, Tile<kAxis, Real>::kTokens), 1);
}

template <Axis kAxis, typename Real>
ConvPlan<Real> lay_out(const ConvProblem& p, int64_t workers, Arena& arena) {
  using Tile = Tile<kAxis, Real>;
  ConvPlan<Real> plan{divide_up(p.C, Tile::kChannels), 0, 1, nullptr, nullptr};
  for (int64_t b = 0; b < p.B; ++b) plan.tiles += tiles_of<kAxis, Real>(sequence_of(p, b));
  if (plan.blocks > 0 && plan.tiles > 0) {
    plan.parts = std::min(divide_up(kItemsPerWorker * workers, plan.blocks), plan.tiles);
  }
  plan.scratch = allocate<ConvScratch<Real>>(arena, workers);
  const int64_t weights = (p.W + 1) * Tile::kChannels;
  for (int64_t n = 0; n < workers; ++n) {
    const ConvScratch<Real> own{allocate<Real>(arena, Tile::kSize),
                                allocate<Real>(arena, Tile::kSize), allocate<Real>(arena, weights)};
    if (arena.base) plan.scratch[n] = own;
  }
  plan.sums = allocate<Real>(arena, plan.blocks * plan.parts * weights);
  return plan;
}

// The weights of a block, transposed, and the bias.
template <typename Tile, typename Real>
void read_weights(const Tile& tile, Real* to) {
  const ConvProblem& p = tile.p;
  for (int64_t w = 0; w < p.W; ++w) {
    read_row(p.weight_dtype, p.weight, tile.c0 * p.W + w, p.W, tile.channels,
             to + w * Tile::kChannels);
  }
  Real* const bias = to + p.W * Tile::kChannels;
  p.bias ? read_row(p.weight_dtype, p.bias, tile.c0, 1, tile.channels, bias)
         : clear(bias, tile.channels);
}

// visit(tile, scratch, tokens, item) for every tile, in order of the tokens within each item.
template <Axis kAxis, typename Real, typename Visit>
void for_each_tile(const ConvProblem& p, const Workers& workers, const ConvPlan<Real>& plan,
                   int64_t parts, Visit&& visit) {
  using Tile = Tile<kAxis, Real>;
  for_each(workers, plan.blocks * parts, [&](int64_t worker, int64_t item) {
    const ConvScratch<Real>& scratch = plan.scratch[worker];
    const int64_t c0 = item / parts * Tile::kChannels, part = item % parts;
    const Tile tile{p, c0, std::min(Tile::kChannels, p.C - c0), scratch.weights};
    read_weights(tile, scratch.weights);
    const int64_t begin = plan.tiles * part / parts, end = plan.tiles * (part + 1) / parts;
    for (int64_t b = 0, before = 0; b < p.B && before < end; ++b) {
      Tokens tokens = sequence_of(p, b);
      const int64_t count = tiles_of<kAxis, Real>(tokens);
      for (int64_t n = std::max<int64_t>(begin - before, 0); n < std::min(count, end - before);
           ++n) {
        tokens.first = n * Tile::kTokens;
        tokens.count = std::min(Tile::kTokens, tokens.T - tokens.first);
        visit(tile, scratch, tokens, item);
      }
      before += count;
    }
  });
}

template <typename Tile, typename Real>
void forward_tile(const Tile& tile, const ConvForwardParams& p, const ConvScratch<Real>& scratch,
                  const Tokens& t) {
  const int64_t h = p.W - 1;
  Real *const x = scratch.x, *const y = scratch.other;
  tile.read({p.state, p.x}, t, t.first, t.count + h, x);
  tile.for_each_vector(t.count, [&](int64_t at, int64_t c) TK_INLINE_LAMBDA {
    const Vec<Real> u = tile.convolve(x + at, c);
    store(y + at, p.silu ? u * sigmoid<Real>(u) : u);
  });
  tile.write(y, {{}, p.y}, t, t.first + h, t.count);
  if (t.is_last()) tile.write(x + t.count * Tile::kStep, {p.end, {}}, t, 0, h);
}

template <Axis kAxis, typename Real>
void forward(const ConvForwardParams& p, const Workers& workers, Arena arena) {
  const ConvPlan<Real> plan = lay_out<kAxis, Real>(p, workers.count, arena);
  // One item reads the state of a sequence and writes it, if these are the same memory.
  const int64_t parts = p.state.data == p.end.data ? 1 : plan.parts;
  for_each_tile<kAxis>(p, workers, plan, parts,
                       [&](const auto& tile, const auto& scratch, const Tokens& t, int64_t) {
                         forward_tile(tile, p, scratch, t);
                       });
}

// du, in place of dy, of the tokens from h before the tile to its end. Tokens outside are zero.
template <typename Tile, typename Real>
void read_du(const Tile& tile, const ConvBackwardParams& p, const Tokens& t, const Real* x,
             Real* du) {
  const int64_t h = p.W - 1, missing = t.first == 0 ? h : 0, end = h + t.count;
  Real* const first = du + missing * Tile::kStep;
  tile.read({{}, p.d_y}, t, t.first + missing, end - missing, first);
  if (p.silu) {
    tile.for_each_vector(end - missing, [&](int64_t at, int64_t c) TK_INLINE_LAMBDA {
      const Vec<Real> u = tile.convolve(x + missing * Tile::kStep + at, c), s = sigmoid<Real>(u);
      store(first + at, load(first + at) * (s * (Real{1} + u * (Real{1} - s))));
    });
  }
  tile.clear_tokens(du, missing);
  tile.clear_tokens(du + end * Tile::kStep, h);
}

// Tile number n is that of the tokens t, and of those of dx' with the same numbers.
template <typename Tile, typename Real>
void backward_tile(const Tile& tile, const ConvBackwardParams& p, const ConvScratch<Real>& scratch,
                   const Tokens& t, Real* sums) {
  constexpr int64_t kStep = Tile::kStep;
  const int64_t h = p.W - 1, missing = t.first == 0 ? h : 0;
  Real *const x = scratch.x, *const du = scratch.other;
  tile.read({p.state, p.x}, t, t.first - h + missing, t.count + 2 * h - missing,
            x + missing * kStep);
  read_du(tile, p, t, x, du);
  tile.add_gradients(x + h * kStep, du + h * kStep, t.count, sums);
  Real* const dx = x;
  tile.clear_tokens(dx, t.count);
  int64_t count = t.count;
  if (t.is_last()) {
    tile.read({p.d_end, {}}, t, 0, h, dx + count * kStep);
    count += h;
  }
  tile.for_each_vector(count, [&](int64_t at, int64_t c) TK_INLINE_LAMBDA {
    store(dx + at, tile.add_products(load(dx + at), du + h * kStep + at, c, -kStep));
  });
  tile.write(dx, {p.dstate, p.dx}, t, t.first, count);
}

// Adds the sums of all parts of a block, in order.
template <typename Tile, typename Real>
void write_weight_gradients(const ConvBackwardParams& p, int64_t block, int64_t parts, Real* sums) {
  const int64_t size = (p.W + 1) * Tile::kChannels, c0 = block * Tile::kChannels;
  const int64_t channels = std::min(Tile::kChannels, p.C - c0);
  for (int64_t part = 1; part < parts; ++part) {
    for (int64_t c = 0; c < size; ++c) sums[c] += sums[part * size + c];
  }
  for (int64_t w = 0; w < p.W; ++w) {
    write_row(sums + w * Tile::kChannels, channels, Real{1}, p.weight_dtype, p.dweight,
              c0 * p.W + w, p.W);
  }
  if (p.dbias) {
    write_row(sums + p.W * Tile::kChannels, channels, Real{1}, p.weight_dtype, p.dbias, c0, 1);
  }
}

template <Axis kAxis, typename Real>
void backward(const ConvBackwardParams& p, const Workers& workers, Arena arena) {
  using Tile = Tile<kAxis, Real>;
  const ConvPlan<Real> plan = lay_out<kAxis, Real>(p, workers.count, arena);
  const int64_t size = (p.W + 1) * Tile::kChannels;
  clear(plan.sums, plan.blocks * plan.parts * size);
  for_each_tile<kAxis>(p, workers, plan, plan.parts,
                       [&](const auto& tile, const auto& scratch, const Tokens& t, int64_t item) {
                         backward_tile(tile, p, scratch, t, plan.sums + item * size);
                       });
  for_each(workers, plan.blocks, [&](int64_t, int64_t block) {
    Real* const sums = plan.sums + block * plan.parts * size;
    write_weight_gradients<Tile>(p, block, plan.parts, sums);
  });
}

}  // namespace tk::cpu::TK_ISA
