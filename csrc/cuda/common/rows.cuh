// Global memory layout: the rows of a head, and the sequence that a CTA processes.
#pragma once

#include "cuda/common/launch_args.h"
#include "cuda/common/tile_config.h"
#include "cuda/platform/sm80_ptx.h"

namespace tk::cuda {

// Architecture that the code is compiled for; it selects one of the two sets of tiles.
#if defined(__CUDA_ARCH__)
constexpr int kArch = __CUDA_ARCH__;
#else
constexpr int kArch = kLargeArch;
#endif

// Dropout of attention weights.
struct Dropout {
  const int64_t* seed;  // null without dropout
  uint32_t threshold;   // a weight is kept if its 16-bit random number is at least this
  float factor;         // of kept weights; see keep_factor
  // Row of query 0, column of key 0 and head of head 0 in the problem that this one is a slice of.
  uint32_t first_row, first_column, first_head;
};

// The scale of the scores, evaluated on the host: float64 is slow on a GPU.
struct ScoreScale {
  bool plain;        // has_plain_scores
  bool has_options;  // has_score_options
  float scale;
};

// Kernel arguments; Params depend on the pass.
template <typename Params>
struct Arguments {
  Params params;
  Varlen varlen;  // cu_seqlens_q null = dense: the sequences are the batch entries
  Dropout dropout;
  ScoreScale score;
  int blocks;  // query blocks or key blocks (by kernel) of the longest sequence
};

// Limit on lengths and diagonals; the sum of two fits an int.
constexpr int64_t kMaxIndex = int64_t{1} << 30;

TK_DEVICE int ceil_divide(int x, int y) { return (x + y - 1) / y; }

TK_DEVICE int clamp_diagonal(int64_t diagonal) {
  return static_cast<int>(max(-kMaxIndex, min(diagonal, kMaxIndex)));
}

// Query i sees keys max(begin, i + low) <= j < min(end, i + high + 1) that its element mask allows.
struct Sequence {
  int b;                 // index of the sequence
  int at;                // batch entry that holds it: b, or 0 for varlen
  int first_q, first_k;  // first rows within the batch entry
  int M, N;
  int low, high;
  int begin, end;

  TK_DEVICE_METHOD int row_begin(int i) const { return max(begin, i + low); }
  TK_DEVICE_METHOD int row_end(int i) const { return i < M ? min(end, i + high + 1) : 0; }
};

// Added to the diagonals and the offsets of distances. False for a dense call: bottom_right.
TK_DEVICE int shift_of(const Varlen& varlen, const Sequence& s) {
  return varlen.bottom_right ? s.N - s.M : 0;
}

struct RowRange {
  int first, count;
};

// Rows of sequence b among `rows`. The offsets are on the device and not validated: clamped.
TK_DEVICE RowRange rows_of_sequence(const int32_t* cu_seqlens, int b, int rows) {
  const int first = min(max(cu_seqlens[b], 0), rows), end = min(cu_seqlens[b + 1], rows);
  return {first, max(end - first, 0)};
}

template <typename Params>
TK_DEVICE Sequence sequence_of(const Arguments<Params>& a, int b) {
  const Problem& p = a.params;
  Sequence s{b, b, 0, 0, static_cast<int>(p.M), static_cast<int>(p.N), 0, 0, 0, 0};
  if (a.varlen.cu_seqlens_q) {
    s.at = 0;
    const RowRange q = rows_of_sequence(a.varlen.cu_seqlens_q, b, s.M);
    const RowRange k = rows_of_sequence(a.varlen.cu_seqlens_k, b, s.N);
    s.first_q = q.first;
    s.first_k = k.first;
    s.M = q.count;
    s.N = k.count;
  }
  s.low = clamp_diagonal(p.mask.diagonal_low + shift_of(a.varlen, s));
  s.high = clamp_diagonal(p.mask.diagonal_high + shift_of(a.varlen, s));
  s.begin = p.mask.key_start ? max(clamp_diagonal(p.mask.key_start[b]), 0) : 0;
  s.end = p.mask.key_end ? min(clamp_diagonal(p.mask.key_end[b]), s.N) : s.N;
  return s;
}

// Blocks first <= n < last.
struct BlockRange {
  int first, last;
};

// Range of key blocks that contains all keys visible to queries i0 <= i < i1.
TK_DEVICE BlockRange key_blocks(const Sequence& s, int i0, int i1, int block_n) {
  return {s.row_begin(i0) / block_n, ceil_divide(s.row_end(i1 - 1), block_n)};
}

// Range of query blocks that contains all queries that see keys j0 <= j < j1. It follows from the
// band i + low <= j <= i + high.
TK_DEVICE BlockRange query_blocks(const Sequence& s, int j0, int j1, int block_m) {
  const int first = max(j0, s.begin), last = min(j1, s.end) - 1;
  if (first > last) return {0, 0};
  return {max(first - s.high, 0) / block_m,
          ceil_divide(max(min(last - s.low + 1, s.M), 0), block_m)};
}

TK_DEVICE void store_two(float* to, float x, float y) {
  to[0] = x;
  to[1] = y;
}
template <typename Element>
TK_DEVICE void store_two(Element* to, float x, float y) {
  *reinterpret_cast<uint32_t*>(to) = pack(x, y, Element{});
}

// The rows of one head; the elements of a row are contiguous.
template <typename Element>
struct Rows {
  Element* data;
  int64_t stride;
  int width;
  bool in_chunks;  // true if rows consist of aligned 16-byte chunks

  TK_DEVICE_METHOD Element* at(int row) const { return data + row * stride; }

  TK_DEVICE_METHOD void store_pair(int row, int column, float x, float y) const {
    Element* const to = at(row) + column;
    if (in_chunks) {
      if (column < width) store_two(to, x, y);
    } else {
      if (column < width) to[0] = to_element<Element>(x);
      if (column + 1 < width) to[1] = to_element<Element>(y);
    }
  }
};

template <typename Element>
TK_DEVICE Rows<Element> rows_of(const Strided& x, int at, int h, int first, int64_t width) {
  Element* const data =
      static_cast<Element*>(x.data) + at * x.stride[0] + h * x.stride[1] + first * x.stride[2];
  const uint64_t bits = reinterpret_cast<uint64_t>(data) |
                        static_cast<uint64_t>(x.stride[2] * sizeof(Element)) |
                        static_cast<uint64_t>(width * sizeof(Element));
  return {data, x.stride[2], static_cast<int>(width), bits % 16 == 0};
}

// Offset of a sequence's first row in lse, delta and dlse, (B, H_q, rows) in float32.
TK_DEVICE int64_t statistics_offset(const Problem& p, const Sequence& s, int h) {
  return (s.at * p.H_q + h) * p.lse_stride + s.first_q;
}

}  // namespace tk::cuda
