// Segments: the parts of a sequence that CTAs compute at the same time, each a run of chunks.
//
// A sequence with n segments has n + 1 boundaries, at which states are stored: segment i is between
// the boundaries i and i + 1. The number of boundary i of sequence b is b (n + 1) + i. For packed
// sequences it is cu_seqlens[b] / length + 2 b + i, which is distinct for all sequences and needs
// no sum over them; segments have the same numbers, so that some CTAs have no segment.
#pragma once

#include <algorithm>

#include "common/linear_params.h"
#include "cuda/common/launch_config.cuh"
#include "cuda/common/rows.cuh"

namespace tk::cuda {

struct Segments {
  const int32_t* cu_seqlens;  // null = dense
  int B;                      // sequences
  int rows;                   // of a batch entry in memory
  int length;                 // tokens of a segment
  int count;                  // segments of a dense sequence, at least 1

  // True if a sequence can have more than one segment.
  bool are_several() const { return length < rows; }
  int64_t boundaries() const {
    return cu_seqlens ? (B ? rows / length + 2 * int64_t{B} : 0) : B * (int64_t{count} + 1);
  }
  // Numbers of segments.
  int64_t programs() const { return cu_seqlens ? boundaries() : int64_t{B} * count; }
};

// `rows` tokens of every sequence, or of all packed ones, in segments of `length`.
inline Segments segments_of(const LinearProblem& p, int64_t rows, int length) {
  const int64_t count = std::max<int64_t>(ceil_of(rows, length), 1);
  return {p.cu_seqlens, static_cast<int>(p.B), static_cast<int>(rows), length,
          static_cast<int>(count)};
}

struct Segment {
  int b;         // index of the sequence
  int at;        // batch entry that holds it: b, or 0 if packed
  int first;     // first row of the sequence within the batch entry
  int tokens;    // of the sequence
  int index;     // of the segment
  int count;     // segments of the sequence, at least 1
  int boundary;  // number of the sequence's boundary 0

  // False for packed CTAs beyond the segments. Offsets that decrease, an error, can make the index
  // negative.
  TK_DEVICE_METHOD bool exists() const { return index >= 0 && index < count; }
};

// Sequence b, as its segment 0.
TK_DEVICE Segment sequence_of(const Segments& s, int b) {
  if (!s.cu_seqlens) return {b, b, 0, s.rows, 0, s.count, b * (s.count + 1)};
  const RowRange rows = rows_of_sequence(s.cu_seqlens, b, s.rows);
  const int count = max(ceil_divide(rows.count, s.length), 1);
  return {b, 0, rows.first, rows.count, 0, count, rows.first / s.length + 2 * b};
}

TK_DEVICE Segment segment_of(const Segments& s, int number) {
  if (!s.cu_seqlens) {
    Segment one = sequence_of(s, number / s.count);
    one.index = number % s.count;
    return one;
  }
  int low = 0, high = s.B - 1;  // the last sequence whose numbers do not begin later
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (sequence_of(s, middle).boundary <= number) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  Segment one = sequence_of(s, low);
  one.index = number - one.boundary;
  return one;
}

struct TokenRange {
  int begin, end;

  TK_DEVICE_METHOD bool holds(int i) const { return i >= begin && i < end; }
};

// Tokens of a sequence whose keys are visible.
TK_DEVICE TokenRange visible_of(const LinearProblem& p, const Segment& s) {
  const int64_t begin = p.key_start ? max(p.key_start[s.b], int64_t{0}) : 0;
  const int64_t end = p.key_end ? min(p.key_end[s.b], int64_t{s.tokens}) : s.tokens;
  return {static_cast<int>(min(begin, kMaxIndex)), static_cast<int>(max(end, int64_t{0}))};
}

// The tokens of a segment in chunks of kTokens, from the last to the first if kReverse.
template <int kTokens, bool kReverse>
struct Chunks {
  int begin, count;

  TK_DEVICE_METHOD Chunks(const Segments& all, const Segment& one) : begin(one.index * all.length) {
    count = ceil_divide(max(min(all.length, one.tokens - begin), 0), kTokens);
  }

  // First token of the chunk that is visited at this step.
  TK_DEVICE_METHOD int first(int step) const {
    return begin + (kReverse ? count - 1 - step : step) * kTokens;
  }
};

}  // namespace tk::cuda
