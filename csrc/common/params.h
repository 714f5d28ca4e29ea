// What kernels are given: plain structs, no torch. Symbols as in docs/attention.md.
#pragma once

#include <cstdint>

namespace tk {

enum class DType : uint8_t { kFloat16, kBFloat16, kFloat32, kFloat64 };

// A four-dimensional tensor; strides count elements, and may be 0 where it broadcasts.
struct Strided {
  void* data = nullptr;
  int64_t stride[4] = {};
};

// Visible: i + diagonal_low <= j <= i + diagonal_high, and every term whose pointer is not null.
struct MaskParams {
  int64_t diagonal_low;
  int64_t diagonal_high;
  const int64_t* key_start = nullptr;   // (B): start <= j
  const int64_t* key_end = nullptr;     // (B): j < end
  const int64_t* q_segments = nullptr;  // (B, M): equal to k_segments[b, j]
  const int64_t* k_segments = nullptr;  // (B, N)
  const uint8_t* dense = nullptr;       // (B, H_q, M, N)
  int64_t dense_stride[4] = {};
  const uint8_t* layout = nullptr;  // (H_q, ceil(M / block_size), ceil(N / block_size))
  int64_t layout_stride[3] = {};
  int64_t block_size = 0;
  // What dense, layout and segments leave of each block (mask.h); null when there is none of them.
  uint8_t* block_mask = nullptr;
  int64_t block_mask_stride[3] = {};  // batch, head, row of blocks; columns are contiguous
};

// s = softcap tanh(scale q k^T / softcap) + bias - slope |i + alibi_offset - j|
struct ScoreParams {
  double scale;
  double softcap;  // 0 = none
  Strided bias;    // data null = none
  DType bias_dtype;
  const void* alibi_slopes;  // (H_q), in the dtype that is computed in; null = none
  int64_t alibi_offset;
};

// Where the problem is part of another one, its bits are those of its place there.
struct DropoutParams {
  double p;
  uint64_t seed;
  int64_t first_batch = 0;  // what b = 0 stands for
  int64_t first_head = 0;   // what h = 0 stands for
};

struct Problem {
  int64_t B, H_q, H_kv, M, N, D, D_v;
  DType dtype;
  Strided q, k, v;
  // Of one sequence in a cache: its keys j lie in page pages[j / page_size], which takes the place
  // of the batch entry in k and v. Null = k and v hold them in order.
  const int32_t* pages = nullptr;
  int64_t page_size = 0;
  int64_t lse_stride;  // of lse and dlse, from head to head: M, or more for part of a problem
  MaskParams mask;
  ScoreParams score;
  DropoutParams dropout;
  // (B, N): keys that key ranges and segments show to some query; the others may hold NaN.
  const uint8_t* live_keys;  // null = all
};

struct ForwardParams : Problem {
  Strided o;
  void* lse;  // (B, H_q, M), rows contiguous, in the dtype that is computed in
};

struct BackwardParams : Problem {
  Strided o, d_o;
  const void* lse;
  const void* dlse;  // (B, H_q, M), laid out as lse; null = zero
  Strided dq, dk, dv;
  Strided dbias;  // same shape and dtype as the bias; data null = not wanted
  int64_t bias_size[4];
};

// Sequence b has rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1, of q and of k and v.
struct Varlen {
  int64_t B;
  const int32_t* cu_seqlens_q;  // (B + 1)
  const int32_t* cu_seqlens_k;  // (B + 1)
  bool bottom_right;  // diagonals and ALiBi count from a sequence's own N - M, as if added to them
};

}  // namespace tk
