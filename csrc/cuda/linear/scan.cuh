// Scan over the chunks of a segment: o, dq, dk or dv of one head, a slice of the columns.
//
//   W_ij  = a_i . b_j + alpha_i beta_j              j <= i; for dk and dv j >= i
//   out_i = sum_j decay(i, j) W_ij c_j + enter_i (a_i T + alpha_i u)
//   T     = kept T + sum_j leave_j b_j c_j^T,  u = kept u + sum_j leave_j beta_j c_j
//
//         a       b           c           alpha   beta    T     u
//   o     phi(q)  phi(k)      v                           S
//   dq    do      v           phi(k)      -delta  1       S^T   z
//   dk    v       do          phi(q) / l  1       -delta  dS^T  dz
//   dv    phi(k)  phi(q) / l  do                          dS
//
// The scan for o keeps z in place of u: l is the sum of the decayed W and enter (a . z) + eps. dq
// is divided by l at the end. Without normalization l is 1 and delta 0. If not causal, T and u are
// those of all tokens, and there are no W. docs/linear.md, sections 2, 3 and 6.
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

struct ScanArguments {
  LinearProblem problem;
  Segments segments;
  Strided a, b, c, out;
  Strided x;              // dq: q, dk: k
  Statistics statistics;  // dq, dk, dv
  float* normalizer;      // o: receives l; null = not normalized
  float* products;  // dq, dk: receives phi(x) . dphi(x), (slices, B, heads, rows); may be null
  States start;     // of boundaries if by_boundary, else of sequences
  States end;       // of sequences
  bool by_boundary;
};

template <typename Element, typename Number, int kWidth, Result kResult>
class Scan {
 public:
  static constexpr LinearTile kTile = linear_tile(sizeof(Number), kWidth);
  static constexpr int kTokens = kTile.tokens, kSlice = kTile.slice;
  static constexpr int kWarps = kTile.warps(), kThreads = kTile.threads();
  static constexpr bool kReverse = is_reverse(kResult), kTransposed = is_transposed(kResult);

  struct Memory {
    alignas(128) Number a[kTokens * kWidth], b[kTokens * kWidth];
    Number c[kTokens * kSlice], T[kWidth * kSlice];
    ChunkDecay<kTokens> decay;
    float inverse[kTokens], delta[kTokens];  // of the queries of the chunk
    float dots[kTokens];                     // o: a . z
    float u[2][kWidth];                      // of this chunk and of the next one
    float parts[kWarps][kWidth];             // sums of each warp's rows, added to u
  };

  static_assert(sizeof(Memory) <= 99 * 1024);  // of one CTA, on the chips with the least

  TK_DEVICE_METHOD Scan(const ScanArguments& args, Memory& memory)
      : args_(args), p_(args.problem), memory_(memory) {
    const int slices = ceil_divide(columns(), kSlice);
    const int heads = static_cast<int>(kReverse ? p_.H_kv : p_.H_q);
    const int program = static_cast<int>(blockIdx.x);
    group_ = static_cast<int>(p_.H_q / p_.H_kv);
    column_ = program % slices * kSlice;
    h_ = program / slices % heads;
    h_kv_ = kReverse ? h_ : h_ / group_;
    segment_ = segment_of(args.segments, program / slices / heads);
    all_ = {0, segment_.tokens};
  }

  TK_DEVICE_METHOD void run() {
    if (!segment_.exists()) return;
    visible_ = visible_of(p_, segment_);
    load_state();
    const Chunks<kTokens, kReverse> chunks(args_.segments, segment_);
#pragma unroll 1
    for (int step = 0; step < chunks.count; ++step) add_chunk(chunks.first(step), step == 0);
    store_state();
  }

 private:
  using State = RunningState<Number, kWidth, kTransposed>;
  using Loader = RowLoader<Element, kWidth>;
  using SliceLoader = RowLoader<Element, kSlice>;
  using Tile = SharedTile<Number, kTokens, kWidth>;
  using Slice = SharedTile<Number, kTokens, kSlice>;
  using Out = Accumulator<1, kSlice / 8>;
  // Columns of u that the CTA needs: all of z, or a slice.
  static constexpr int kSums = kTransposed ? kSlice : kWidth;

  TK_DEVICE_METHOD int columns() const {
    return static_cast<int>(kTransposed ? p_.D : p_.D_v);  // of out
  }
  TK_DEVICE_METHOD bool is_decayed() const { return p_.log_decay.data; }
  TK_DEVICE_METHOD Tile a() const { return {memory_.a}; }
  TK_DEVICE_METHOD Tile b() const { return {memory_.b}; }
  TK_DEVICE_METHOD Slice c() const { return {memory_.c}; }
  TK_DEVICE_METHOD typename State::Tile T() const { return {memory_.T}; }
  TK_DEVICE_METHOD float* u() const { return memory_.u[current_]; }
  TK_DEVICE_METHOD const float* leave() const {
    return kReverse ? memory_.decay.from_start : memory_.decay.to_end;
  }
  TK_DEVICE_METHOD float leave(int row) const { return is_decayed() ? leave()[row] : 1.0f; }
  TK_DEVICE_METHOD float enter(int row) const {
    if (!is_decayed()) return 1.0f;
    return kReverse ? memory_.decay.to_end[row] : memory_.decay.from_start[row];
  }
  TK_DEVICE_METHOD float inverse(int row) const { return p_.normalize ? memory_.inverse[row] : 1; }
  TK_DEVICE_METHOD float delta(int row) const { return p_.normalize ? memory_.delta[row] : 0; }

  // First row of the warp. Opaque, so that addresses do not occupy registers between their uses.
  TK_DEVICE_METHOD static int first_row() { return opaque(16 * warp_index()); }

  TK_DEVICE_METHOD void load_state() {
    const int64_t n =
        args_.by_boundary ? segment_.boundary + segment_.index + kReverse : segment_.b;
    state_.load(args_.start.matrix(p_, n, h_kv_), p_, column_);
    const float* const z = args_.start.vector(p_, n, h_kv_);
    const int first = kTransposed ? column_ : 0, D = static_cast<int>(p_.D);
    for (int c = static_cast<int>(threadIdx.x); c < kSums; c += kThreads) {
      u()[c] = z && first + c < D ? z[first + c] : 0.0f;
    }
  }

  // The CTA of the sequence's last segment in the order of the scan stores the final state.
  TK_DEVICE_METHOD void store_state() {
    const bool is_last = segment_.index == (kReverse ? 0 : segment_.count - 1);
    if (!is_last || (!kReverse && h_ % group_ != 0)) return;
    float* const S = args_.end.matrix(p_, segment_.b, h_kv_);
    if (S) state_.store(S, p_, column_);
    float* const z = args_.end.vector(p_, segment_.b, h_kv_);
    if (!z || (!kTransposed && column_ != 0)) return;
    const int first = kTransposed ? column_ : 0, D = static_cast<int>(p_.D);
    for (int c = static_cast<int>(threadIdx.x); c < kSums; c += kThreads) {
      if (first + c < D) z[first + c] = u()[c];
    }
  }

  TK_DEVICE_METHOD void add_chunk(int first, bool is_first_chunk) {
    __syncthreads();  // the tiles of the previous chunk have been read
    if (is_decayed() && warp_index() == 0) {
      memory_.decay.read(p_, segment_, h_kv_, first, visible_);
    }
    const int first_head = kReverse ? h_ * group_ : h_kv_;  // of b and c
    if (kResult != Result::kO) read_statistics(first, kReverse ? first_head : h_);
    if (is_decayed() || kResult != Result::kO) __syncthreads();  // both are written
    load_a(first);
    if (p_.causal || is_first_chunk) state_.store_shared(T());

    Out out;
    float sums[2] = {};  // o: those of the lane in l, for its two rows
    const int heads = kReverse && p_.causal ? group_ : 1;
    for (int n = 0; n < heads; ++n) {
      if (p_.causal) load_pairs(first, first_head + n, n == 0);
      __syncthreads();  // the tiles are written
      if (n == 0) enter_state(out, sums);
      if (p_.causal) add_pairs(out, sums, n == 0);
    }
    if (p_.causal && kResult != Result::kDv) current_ ^= 1;
    store_rows(out, sums, first);
  }

  TK_DEVICE_METHOD void read_statistics(int first, int h) const {
    if (!p_.normalize || (kReverse && !p_.causal)) return;
    args_.statistics.read(p_, segment_, h, first, memory_.inverse, memory_.delta);
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
          if constexpr (kResult == Result::kO) dot += x * u()[loader.column(n)];
          return x;
        },
        [&](int row) {
          if constexpr (kResult != Result::kO) return;
          dot = loader.sum_of_row(dot);
          if (lane_index() % Loader::kLanes == 0) memory_.dots[row] = dot;
          dot = 0.0f;
        });
  }

  // The rows of b and c of one head, and their sums for u.
  TK_DEVICE_METHOD void load_pairs(int first, int h, bool is_first_head) const {
    if (!is_first_head) {
      __syncthreads();  // the tiles of the previous head have been read
      read_statistics(first, h);
      __syncthreads();  // the statistics are written
    }
    const Loader loader;
    const SliceLoader slice_loader;
    const auto no_end = [](int) {};
    const TokenRange& live = kReverse ? all_ : visible_;
    const auto b_rows = rows_of<const Element>(args_.b, segment_.at, h, segment_.first,
                                               kTransposed ? p_.D_v : p_.D);
    const auto c_rows = from_column(
        rows_of<const Element>(args_.c, segment_.at, h, segment_.first, columns()), column_);
    if constexpr (kTransposed) {
      const auto value = [](int, int, float x) { return x; };
      loader.load(b(), b_rows, first, live, value, no_end);
      float sums[SliceLoader::kPerLane] = {};
      const auto scaled = [&](int row, int n, float x) {
        x = feature(p_.feature_map, x);
        if constexpr (kReverse) x *= inverse(row);
        sums[n] += x * leave(row) * (kReverse ? -delta(row) : 1.0f);
        return x;
      };
      slice_loader.load(c(), c_rows, first, live, scaled, no_end);
      slice_loader.store_sums(sums, memory_.parts[warp_index()]);
    } else {
      float sums[Loader::kPerLane] = {};
      const auto scaled = [&](int row, int n, float x) {
        x = feature(p_.feature_map, x);
        if constexpr (kReverse) return x * inverse(row);
        sums[n] += x * leave(row);
        return x;
      };
      loader.load(b(), b_rows, first, live, scaled, no_end);
      if constexpr (!kReverse) loader.store_sums(sums, memory_.parts[warp_index()]);
      const auto value = [](int, int, float x) { return x; };
      slice_loader.load(c(), c_rows, first, live, value, no_end);
    }
  }

  // Computes enter (a T + alpha u), and decays the state.
  TK_DEVICE_METHOD void enter_state(Out& out, float (&sums)[2]) {
    out.clear();
    const int first = first_row();
    add_product<Major::kK, Major::kMN, kWidth>(out, a(), first, T(), 0);
    if (kResult == Result::kDq && p_.normalize) {
      out.for_each([&](int i, int j, float& x) { x -= memory_.delta[first + i] * u()[j]; });
    }
    if constexpr (kResult == Result::kDk) {
      out.for_each([&](int, int j, float& x) { x += u()[j]; });
    }
    if (is_decayed()) out.for_each([&](int i, int, float& x) { x *= enter(first + i); });
    if (kResult == Result::kO && lane_index() % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first + row_of(2 * half);
        sums[half] = enter(row) * memory_.dots[row];
      }
    }
    if (is_decayed() && p_.causal) state_.multiply_by(memory_.decay.kept);
  }

  // Adds the pairs of the chunk to out, and b and c to the state.
  TK_DEVICE_METHOD void add_pairs(Out& out, float (&sums)[2], bool is_first_head) {
    if constexpr (kResult != Result::kDv) add_parts(is_first_head);
    Accumulator<1, kTokens / 8> w;
    w.clear();
    const int first = first_row();
    add_product<Major::kK, Major::kK, kWidth>(w, a(), first, b(), 0);
    w.for_each([&](int i, int j, float& x) {
      const int row = first + i;
      if constexpr (kTransposed) x -= delta(kReverse ? j : row);
      const bool is_pair = kReverse ? j >= row : j <= row;
      if (is_decayed() && is_pair) {
        x *= kReverse ? memory_.decay.between(j, row) : memory_.decay.between(row, j);
      }
      if (!is_pair) x = 0.0f;
    });
    if constexpr (kResult == Result::kO) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        w.for_each_pair_of(0, half, [&](int, float x, float y) { sums[half] += x + y; });
      }
    }
    add_product<Major::kMN>(out, w, c());
    if (is_decayed()) {
      __syncthreads();  // c has been read
      multiply_rows<kThreads>(c(), leave());
      __syncthreads();  // c is scaled
    }
    state_.add_product(b(), c());
  }

  // Adds the sums of all warps to u of the next chunk.
  TK_DEVICE_METHOD void add_parts(bool is_first_head) const {
    float* const next = memory_.u[current_ ^ 1];
    const float kept = is_decayed() ? memory_.decay.kept : 1.0f;
    for (int c = static_cast<int>(threadIdx.x); c < kSums; c += kThreads) {
      float x = is_first_head ? kept * u()[c] : next[c];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) x += memory_.parts[w][c];
      next[c] = x;
    }
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
    const float factor = kReverse ? 1.0f : inverse(row);
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

  const ScanArguments& args_;
  const LinearProblem& p_;
  Memory& memory_;
  State state_;
  Segment segment_;
  TokenRange all_, visible_;
  int group_, h_, h_kv_, column_;
  int current_ = 0;
};

template <typename Element, typename Number, int kWidth, Result kResult>
TK_KERNEL((Scan<Element, Number, kWidth, kResult>::kThreads), 1)
scan_kernel(const __grid_constant__ ScanArguments args) {
  using Scan = Scan<Element, Number, kWidth, kResult>;
  TK_SHARED_MEMORY(shared);
  Scan(args, *reinterpret_cast<typename Scan::Memory*>(shared)).run();
}

}  // namespace tk::cuda
