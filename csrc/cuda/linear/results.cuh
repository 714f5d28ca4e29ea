// Results: o, dq, dk or dv of one chunk of a head, a slice of the columns, from the state and the
// chunks of its segment.
//
//   W_ij  = a_i . b_j + alpha_i beta_j              j <= i; for dk and dv j >= i
//   out_i = sum_j decay(i, j) W_ij c_j + enter_i (a_i T + alpha_i u)
//
//         a       b           c           alpha   beta    T     u
//   o     phi(q)  phi(k)      v                           S
//   dq    do      v           phi(k)      -delta  1       S^T   z
//   dk    v       do          phi(q) / l  1       -delta  dS^T  dz
//   dv    phi(k)  phi(q) / l  do                          dS
//
// T and u are the state at the start of the segment, for dk and dv at its end; the sum is over the
// tokens from there on. The denominator l of o is the sum of the decayed W and enter (a . z) + eps.
// dq is divided by l at the end. Without normalization l is 1 and delta 0. If not causal, T and u
// are those of all tokens, and there are no W. docs/linear.md, sections 2, 3 and 6.
#pragma once

#include "cuda/linear/decay.cuh"
#include "cuda/linear/features.cuh"
#include "cuda/linear/load_rows.cuh"
#include "cuda/linear/running_state.cuh"
#include "cuda/linear/statistics.cuh"

namespace tk::cuda {

enum class Result { kO, kDq, kDk, kDv };

// From the last token to the first, for key heads.
constexpr bool is_reverse(Result result) { return result >= Result::kDk; }
// The state is S^T or dS^T; a and b are rows of values, c of features.
constexpr bool is_transposed(Result result) {
  return result == Result::kDq || result == Result::kDk;
}

struct ResultArguments {
  LinearProblem problem;
  Segments segments;
  Strided a, b, c, out;
  Strided x;              // dq: q, dk: k
  Statistics statistics;  // dq, dk, dv
  float* normalizer;      // o: receives l; null = not normalized
  float* products;  // dq, dk: receives phi(x) . dphi(x), (slices, B, heads, rows); may be null
  States start;     // of boundaries if by_boundary, else of sequences
  bool by_boundary;
};

template <typename Element, typename Number, int kWidth, Result kResult>
class ChunkResult {
 public:
  static constexpr LinearTile kTile = linear_tile(sizeof(Number), kWidth);
  static constexpr int kTokens = kTile.tokens, kSlice = kTile.slice;
  static constexpr int kWarps = kTile.warps(), kThreads = kTile.threads();
  static constexpr bool kReverse = is_reverse(kResult), kTransposed = is_transposed(kResult);

  struct Memory {
    struct Pairs {
      Number b[kTokens * kWidth], c[kTokens * kSlice];
    };
    alignas(128) Number a[kTokens * kWidth];
    union {
      Number T[kWidth * kSlice];  // until its product with a
      Pairs pairs;
    };
    ChunkDecay<kTokens> decay;               // of the visited chunk
    float inverse[kTokens], delta[kTokens];  // dq: of its rows; dk, dv: of the visited queries
    float dots[kTokens];                     // o: a . z
    float u[kWidth];
  };

  static_assert(sizeof(Memory) <= 99 * 1024);  // of one CTA, on the chips with the least

  TK_DEVICE_METHOD ChunkResult(const ResultArguments& args, Memory& memory)
      : args_(args), p_(args.problem), memory_(memory) {
    const int slices = ceil_divide(columns(), kSlice);
    const int heads = static_cast<int>(kReverse ? p_.H_kv : p_.H_q);
    const int program = static_cast<int>(blockIdx.x), chunk = program / slices / heads;
    const int in_segment = args.segments.length / kTokens;
    group_ = static_cast<int>(p_.H_q / p_.H_kv);
    column_ = program % slices * kSlice;
    h_ = program / slices % heads;
    h_kv_ = kReverse ? h_ : h_ / group_;
    segment_ = segment_of(args.segments, chunk / in_segment);
    index_ = chunk % in_segment;
    all_ = {0, segment_.tokens};
  }

  TK_DEVICE_METHOD void run() {
    if (!segment_.exists()) return;
    const Chunks<kTokens, kReverse> chunks(args_.segments, segment_);
    if (index_ >= chunks.count) return;
    visible_ = visible_of(p_, segment_);
    const int own_step = kReverse ? chunks.count - 1 - index_ : index_;
    const int own = chunks.first(own_step);
    Out out;
    float sums[2] = {};  // o: those of the lane in l, for its two rows
    load_state();
    if (kResult == Result::kDq) read_statistics(own, h_);
    __syncthreads();  // the state and the statistics are written
    load_a(own);
    __syncwarp();  // the warp's rows of a are written
    add_state(out, sums);
    if (p_.causal) {
      const int first_head = kReverse ? h_ * group_ : h_kv_, heads = kReverse ? group_ : 1;
#pragma unroll 1
      for (int step = 0; step <= own_step; ++step) {
#pragma unroll 1
        for (int n = 0; n < heads; ++n) {
          load_pairs(chunks.first(step), first_head + n, n == 0);
          if (is_decayed() && n == 0) decay_sums(out, sums, step == own_step);
          add_pairs(out, sums, step == own_step);
        }
      }
    }
    store_rows(out, sums, own);
  }

 private:
  using Loader = RowLoader<Element, kWidth>;
  using SliceLoader = RowLoader<Element, kSlice>;
  using Tile = SharedTile<Number, kTokens, kWidth>;
  using Slice = SharedTile<Number, kTokens, kSlice>;
  using State = SharedTile<Number, kWidth, kSlice>;
  using Out = Accumulator<1, kSlice / 8>;

  TK_DEVICE_METHOD int columns() const {
    return static_cast<int>(kTransposed ? p_.D : p_.D_v);  // of out
  }
  TK_DEVICE_METHOD bool is_decayed() const { return p_.log_decay.data; }
  TK_DEVICE_METHOD Tile a() const { return {memory_.a}; }
  TK_DEVICE_METHOD Tile b() const { return {memory_.pairs.b}; }
  TK_DEVICE_METHOD Slice c() const { return {memory_.pairs.c}; }
  TK_DEVICE_METHOD State T() const { return {memory_.T}; }
  TK_DEVICE_METHOD float enter(int row) const {
    return kReverse ? memory_.decay.to_end[row] : memory_.decay.from_start[row];
  }
  TK_DEVICE_METHOD float leave(int row) const {
    return kReverse ? memory_.decay.from_start[row] : memory_.decay.to_end[row];
  }

  // First row of the warp. Opaque, so that addresses do not occupy registers between their uses.
  TK_DEVICE_METHOD static int first_row() { return opaque(16 * warp_index()); }

  TK_DEVICE_METHOD void load_state() {
    const int64_t n =
        args_.by_boundary ? segment_.boundary + segment_.index + kReverse : segment_.b;
    load_matrix<kThreads, kTransposed>(T(), args_.start.matrix(p_, n, h_kv_), p_, column_);
    const float* const z = args_.start.vector(p_, n, h_kv_);
    const int first = kTransposed ? column_ : 0, D = static_cast<int>(p_.D);
    constexpr int kColumns = kTransposed ? kSlice : kWidth;  // of u: all of z, or a slice
    for (int c = static_cast<int>(threadIdx.x); c < kColumns; c += kThreads) {
      memory_.u[c] = z && first + c < D ? z[first + c] : 0.0f;
    }
  }

  TK_DEVICE_METHOD void read_statistics(int first, int h) const {
    if (p_.normalize) {
      args_.statistics.read(p_, segment_, h, first, memory_.inverse, memory_.delta);
    }
  }

  // The rows of a: queries, or keys. For o also their products with z.
  TK_DEVICE_METHOD void load_a(int first) const {
    const auto rows = rows_of<const Element>(args_.a, segment_.at, h_, segment_.first,
                                             kTransposed ? p_.D_v : p_.D);
    const TokenRange& live = kReverse ? visible_ : all_;
    const Loader loader;
    float dot = 0.0f;
    loader.load(
        a(), rows, first, live,
        [&](int, int n, float x) {
          if constexpr (kTransposed) return x;
          x = feature(p_.feature_map, x);
          if constexpr (kResult == Result::kO) dot += x * memory_.u[loader.column(n)];
          return x;
        },
        [&](int row) {
          if constexpr (kResult != Result::kO) return;
          dot = loader.sum_of_row(dot);
          if (lane_index() % Loader::kLanes == 0) memory_.dots[row] = dot;
          dot = 0.0f;
        });
  }

  // Computes a T + alpha u.
  TK_DEVICE_METHOD void add_state(Out& out, float (&sums)[2]) const {
    out.clear();
    const int first = first_row();
    add_product<Major::kK, Major::kMN, kWidth>(out, a(), first, T(), 0);
    if (kResult == Result::kDq && p_.normalize) {
      out.for_each([&](int i, int j, float& x) { x -= memory_.delta[first + i] * memory_.u[j]; });
    }
    if constexpr (kResult == Result::kDk) {
      out.for_each([&](int, int j, float& x) { x += memory_.u[j]; });
    }
    if (kResult == Result::kO && lane_index() % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) sums[half] = memory_.dots[first + row_of(2 * half)];
    }
  }

  // The rows of b and c of a chunk and head; its decay and statistics.
  TK_DEVICE_METHOD void load_pairs(int first, int h, bool is_first_head) const {
    __syncthreads();  // the state or the previous tiles have been read
    if (is_decayed() && is_first_head && warp_index() == 0) {
      memory_.decay.read(p_, segment_, h_kv_, first, visible_);
    }
    if (kReverse) read_statistics(first, h);
    const TokenRange& live = kReverse ? all_ : visible_;
    const auto b_rows = rows_of<const Element>(args_.b, segment_.at, h, segment_.first,
                                               kTransposed ? p_.D_v : p_.D);
    const auto c_rows = from_column(
        rows_of<const Element>(args_.c, segment_.at, h, segment_.first, columns()), column_);
    const auto value = [](int, int, float x) { return x; };
    const auto mapped = [&](int, int, float x) { return feature(p_.feature_map, x); };
    const auto no_end = [](int) {};
    if constexpr (kTransposed) {
      Loader().load(b(), b_rows, first, live, value, no_end);
      SliceLoader().load(c(), c_rows, first, live, mapped, no_end);
    } else {
      Loader().load(b(), b_rows, first, live, mapped, no_end);
      SliceLoader().load(c(), c_rows, first, live, value, no_end);
    }
    __syncthreads();  // the tiles are written
  }

  // Decays the sums to the end of the visited chunk, or to the rows of the own one.
  TK_DEVICE_METHOD void decay_sums(Out& out, float (&sums)[2], bool is_own) const {
    const int first = first_row();
    const auto factor = [&](int row) { return is_own ? enter(row) : memory_.decay.kept; };
    out.for_each([&](int i, int, float& x) { x *= factor(first + i); });
#pragma unroll
    for (int half = 0; half < 2; ++half) sums[half] *= factor(first + row_of(2 * half));
  }

  // Adds the pairs of the rows with the visited chunk.
  TK_DEVICE_METHOD void add_pairs(Out& out, float (&sums)[2], bool is_own) const {
    Accumulator<1, kTokens / 8> w;
    w.clear();
    const int first = first_row();
    add_product<Major::kK, Major::kK, kWidth>(w, a(), first, b(), 0);
    if (kResult != Result::kO && p_.normalize) {
      w.for_each([&](int i, int j, float& x) {
        if constexpr (kTransposed) x -= memory_.delta[kReverse ? j : first + i];
        if constexpr (kReverse) x *= memory_.inverse[j];
      });
    }
    if (is_own) {
      w.for_each([&](int i, int j, float& x) { x = own_pair(first + i, j, x); });
    } else if (is_decayed()) {
      w.for_each([&](int, int j, float& x) { x *= leave(j); });
    }
    if constexpr (kResult == Result::kO) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        w.for_each_pair_of(0, half, [&](int, float x, float y) { sums[half] += x + y; });
      }
    }
    add_product<Major::kMN>(out, w, c());
  }

  // The weight x of a pair of the own chunk, decayed; 0 if j is later than i, or earlier if
  // reversed.
  TK_DEVICE_METHOD float own_pair(int i, int j, float x) const {
    if (kReverse ? j < i : j > i) return 0.0f;
    if (!is_decayed()) return x;
    return x * (kReverse ? memory_.decay.between(j, i) : memory_.decay.between(i, j));
  }

  TK_DEVICE_METHOD void store_rows(const Out& out, float (&sums)[2], int first) const {
    const auto rows = from_column(
        rows_of<Element>(args_.out, segment_.at, h_, segment_.first, columns()), column_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row() + row_of(2 * half), i = first + row;
      const bool exists = i < segment_.tokens;
      if constexpr (kTransposed) {
        store_gradient(out, half, row, i, exists, rows);
      } else {
        const bool is_live = exists && (!kReverse || visible_.holds(i));
        const float l = kResult == Result::kO ? normalizer(sums[half], i, exists) : 1.0f;
        out.for_each_pair_of(0, half, [&](int j, float x, float y) {
          if (exists) rows.store_pair(i, j, is_live ? x / l : 0.0f, is_live ? y / l : 0.0f);
        });
      }
    }
  }

  // l of row i, which the first slice stores; 1 if not normalized.
  TK_DEVICE_METHOD float normalizer(float sum, int i, bool exists) const {
    if (!p_.normalize) return 1.0f;
    for (int distance = 1; distance < 4; distance *= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
    }
    const float l = sum + static_cast<float>(p_.eps);
    if (exists && column_ == 0 && lane_index() % 4 == 0) {
      args_.normalizer[(segment_.at * p_.H_q + h_) * p_.M + segment_.first + i] = l;
    }
    return l;
  }

  // Row i of dq or dk, from the gradient of its features.
  TK_DEVICE_METHOD void store_gradient(const Out& out, int half, int row, int i, bool exists,
                                       const Rows<Element>& rows) const {
    const auto x_rows = from_column(
        rows_of<const Element>(args_.x, segment_.at, h_, segment_.first, columns()), column_);
    const bool is_live = exists && (!kReverse || visible_.holds(i));
    const float factor = kResult == Result::kDq && p_.normalize ? memory_.inverse[row] : 1.0f;
    const FeatureMap map = p_.feature_map;
    float product = 0.0f;
    const auto gradient = [&](int j, float y) {
      if (!is_live || j >= x_rows.width) return 0.0f;
      const float x = to_float(x_rows.at(i)[j]);
      y *= factor;
      product += feature(map, x) * y;
      return times_slope(map, y, x);
    };
    out.for_each_pair_of(0, half, [&](int j, float first, float second) {
      const float x = gradient(j, first), y = gradient(j + 1, second);
      if (exists) rows.store_pair(i, j, x, y);
    });
    if (!args_.products) return;
    for (int distance = 1; distance < 4; distance *= 2) {
      product += __shfl_xor_sync(~0u, product, distance);
    }
    if (!exists || lane_index() % 4 != 0) return;
    const int64_t batches = p_.cu_seqlens ? 1 : p_.B, heads = kReverse ? p_.H_kv : p_.H_q;
    const int64_t entry = (column_ / kSlice * batches + segment_.at) * heads + h_;
    args_.products[entry * args_.segments.rows + segment_.first + i] = product;
  }

  const ResultArguments& args_;
  const LinearProblem& p_;
  Memory& memory_;
  Segment segment_;
  TokenRange all_, visible_;
  int group_, h_, h_kv_, column_;
  int index_;  // of the chunk in its segment
};

template <typename Element, typename Number, int kWidth, Result kResult>
TK_KERNEL((ChunkResult<Element, Number, kWidth, kResult>::kThreads), 1)
results_kernel(const __grid_constant__ ResultArguments args) {
  using ChunkResult = ChunkResult<Element, Number, kWidth, kResult>;
  TK_SHARED_MEMORY(shared);
  ChunkResult(args, *reinterpret_cast<typename ChunkResult::Memory*>(shared)).run();
}

}  // namespace tk::cuda
