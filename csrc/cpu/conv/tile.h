// Tiles of the convolution: a block of channels of a run of tokens, converted to the compute dtype.
#pragma once

#include <algorithm>

#include "common/conv_params.h"
#include "cpu/engine/arena.h"
#include "cpu/engine/convert.h"
#include "cpu/engine/vec_math.h"

namespace tk::cpu::TK_ISA {

// The dimension that vectors run over: the one that is contiguous in memory. Tokens are strided in
// steps (T = 1), and where there are too few of them to fill vectors.
enum class Axis : uint8_t { kChannels, kTokens };

constexpr int64_t kFewTokens = 16;

TK_INLINE Axis axis_of(const ConvProblem& p) {
  const bool tokens_first = p.x.stride[2] < p.x.stride[1] || p.C == 1;
  return p.T >= kFewTokens && tokens_first ? Axis::kTokens : Axis::kChannels;
}

// Tokens of a sequence, a part of those of one tile.
struct Tokens {
  int64_t b, entry;
  int64_t start, T;      // of the sequence in its entry; its length
  int64_t first, count;  // in the sequence

  bool is_last() const { return first + count == T; }
};

// x' = [state, x], h + T tokens with h = W - 1, or a tensor of the same sizes. What has no data is
// zero when read, and is not written.
struct Extended {
  Strided state, x;
};

template <Axis kAxis, typename Real>
struct Tile {
  // 32 KiB of float32, of rows of 1 or 2 KiB.
  static constexpr int64_t kChannels = kAxis == Axis::kChannels ? 256 : 16;
  static constexpr int64_t kTokens = kAxis == Axis::kChannels ? 32 : 512;
  // Space for W - 1 more tokens on both sides, and for vectors that end past the last token.
  static constexpr int64_t kSpace = 2 * kMaxConvWidth + 2 * kLanes<Real>;
  static constexpr int64_t kPitch =
      kAxis == Axis::kChannels ? kChannels : kTokens + kSpace;             // from row to row
  static constexpr int64_t kStep = kAxis == Axis::kChannels ? kPitch : 1;  // to the next token
  static constexpr int64_t kSize =
      kPitch * (kAxis == Axis::kChannels ? kTokens + 2 * kMaxConvWidth : kChannels);

  const ConvProblem& p;
  int64_t c0, channels;  // of the block
  const Real* weights;   // (W + 1, kChannels): weight transposed, then bias

  // visit(part, offset, stride, count, at) for runs of elements of tokens s0 .. s0 + tokens - 1 of
  // x': `count` elements from `offset` on in memory, from `at` on in a tile.
  template <typename Visit>
  TK_INLINE_METHOD void for_each_run(const Extended& x, const Tokens& t, int64_t s0, int64_t tokens,
                                     Visit&& visit) const {
    const int64_t h = p.W - 1, in_state = std::clamp<int64_t>(h - s0, 0, tokens);
    const auto offset_of = [&](int64_t c, int64_t s) {
      return s < h ? t.b * x.state.stride[0] + c * x.state.stride[1] + s * x.state.stride[2]
                   : row_offset(x.x, t.entry, c, t.start + s - h);
    };
    const auto run = [&](int64_t d, int64_t c, int64_t s, int64_t count, int64_t at) {
      const Strided& part = s < h ? x.state : x.x;
      if (count > 0) visit(part.data, offset_of(c, s), part.stride[d], count, at);
    };
    if constexpr (kAxis == Axis::kChannels) {
      for (int64_t n = 0; n < tokens; ++n) run(1, c0, s0 + n, channels, n * kPitch);
    } else {
      for (int64_t c = 0; c < channels; ++c) {
        run(2, c0 + c, s0, in_state, c * kPitch);
        run(2, c0 + c, s0 + in_state, tokens - in_state, c * kPitch + in_state);
      }
    }
  }

  TK_INLINE_METHOD void read(const Extended& x, const Tokens& t, int64_t s0, int64_t tokens,
                             Real* to) const {
    for_each_run(x, t, s0, tokens,
                 [&](void* data, int64_t offset, int64_t stride, int64_t count, int64_t at) {
                   data ? read_row(p.dtype, data, offset, stride, count, to + at)
                        : clear(to + at, count);
                 });
  }

  TK_INLINE_METHOD void write(const Real* from, const Extended& x, const Tokens& t, int64_t s0,
                              int64_t tokens) const {
    for_each_run(x, t, s0, tokens,
                 [&](void* data, int64_t offset, int64_t stride, int64_t count, int64_t at) {
                   if (data) write_row(from + at, count, Real{1}, p.dtype, data, offset, stride);
                 });
  }

  // Clears `tokens` tokens of a tile from x on.
  TK_INLINE_METHOD void clear_tokens(Real* x, int64_t tokens) const {
    if constexpr (kAxis == Axis::kChannels) {
      clear(x, tokens * kPitch);
    } else {
      for (int64_t c = 0; c < channels; ++c) clear(x + c * kPitch, tokens);
    }
  }

  // visit(offset, c) for the vectors of `tokens` tokens; c is the channel or the first of them.
  template <typename Visit>
  TK_INLINE_METHOD void for_each_vector(int64_t tokens, Visit&& visit) const {
    const bool of_channels = kAxis == Axis::kChannels;
    const int64_t rows = of_channels ? tokens : channels, width = of_channels ? channels : tokens;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t n = 0; n < width; n += kLanes<Real>) visit(r * kPitch + n, of_channels ? n : r);
    }
  }

  // Row w of the weights for a vector.
  TK_INLINE_METHOD Vec<Real> weight(int64_t w, int64_t c) const {
    const Real* const from = weights + w * kChannels + c;
    return kAxis == Axis::kChannels ? load(from) : broadcast(*from);
  }

  // sum + weight_0 x_0 + weight_1 x_1 + ..., where x_w lies w tokens after x, or before it.
  TK_INLINE_METHOD Vec<Real> add_products(Vec<Real> sum, const Real* x, int64_t c,
                                          int64_t step = kStep) const {
    for (int64_t w = 0; w < p.W; ++w) sum += weight(w, c) * load(x + w * step);
    return sum;
  }

  // The convolution at a token, of which x is the first input.
  TK_INLINE_METHOD Vec<Real> convolve(const Real* x, int64_t c) const {
    return add_products(weight(p.W, c), x, c);
  }

  // sums (W + 1, kChannels) += those of du_t x'_{t + w} and du_t over `tokens` tokens.
  TK_INLINE_METHOD void add_gradients(const Real* x, const Real* du, int64_t tokens,
                                      Real* sums) const {
    constexpr bool kOfChannels = kAxis == Axis::kChannels;
    constexpr int64_t kNext = kOfChannels ? kPitch : kLanes<Real>;
    const int64_t full = kOfChannels ? tokens * kPitch : tokens / kNext * kNext;
    const auto inside = iota<Real>() < static_cast<Real>(tokens - full);
    for (int64_t c = 0; c < channels; c += kOfChannels ? kLanes<Real> : 1) {
      const int64_t first = kOfChannels ? c : c * kPitch;
      for (int64_t w = 0; w <= p.W; ++w) {
        const auto term = [&](int64_t n) TK_INLINE_LAMBDA {
          const Vec<Real> factor = load(du + first + n);
          return w == p.W ? factor : factor * load(x + first + n + w * kStep);
        };
        Vec<Real> sum{};
        for (int64_t n = 0; n < full; n += kNext) sum += term(n);
        // What follows the last token may be NaN.
        if (!kOfChannels && full < tokens) sum += inside ? term(full) : Vec<Real>{};
        Real* const to = sums + w * kChannels + c;
        if constexpr (kOfChannels) {
          store(to, load(to) + sum);
        } else {
          *to += reduce<Real>(sum, [](Vec<Real> a, Vec<Real> b) { return a + b; })[0];
        }
      }
    }
  }
};

}  // namespace tk::cpu::TK_ISA
