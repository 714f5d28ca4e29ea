// Kernel parameters: plain structs without torch types. Symbols as in docs/attention.md.
#pragma once

#include <cstdint>

namespace tk {

enum class DType : uint8_t { kFloat16, kBFloat16, kFloat32, kFloat64 };

// A four-dimensional tensor. Strides count elements; broadcast dimensions may have stride 0.
struct Strided {
  void* data = nullptr;
  int64_t stride[4] = {};
};

// Element (i, j) is visible if i + diagonal_low <= j <= i + diagonal_high and every constraint
// whose pointer is not null holds. dense, layout and segments form the element mask.
struct MaskParams {
  int64_t diagonal_low;
  int64_t diagonal_high;
  const int64_t* key_start = nullptr;   // (B): start <= j
  const int64_t* key_end = nullptr;     // (B): j < end
  const int64_t* q_segments = nullptr;  // (B, M): must equal k_segments[b, j]
  const int64_t* k_segments = nullptr;  // (B, N)
  const uint8_t* dense = nullptr;       // (B, H_q, M, N)
  int64_t dense_stride[4] = {};
  const uint8_t* layout = nullptr;  // (H_q, ceil(M / block_size), ceil(N / block_size))
  int64_t layout_stride[3] = {};
  int64_t block_size = 0;
  // Visibility per 64 x 64 block under the element mask (mask.h); null without an element mask.
  uint8_t* block_mask = nullptr;
  int64_t block_mask_stride[3] = {};  // batch, head, block row; block columns are contiguous
};

// s = softcap tanh(scale q k^T / softcap) + bias - slope |i + alibi_offset - j|
struct ScoreParams {
  double scale;
  double softcap;  // 0 = none
  Strided bias;    // data null = no bias
  DType bias_dtype;
  const void* alibi_slopes;  // (H_q), in the compute dtype; null = none
  int64_t alibi_offset;
};

// Dropout. If the problem is a slice of a larger one, its random bits are those of the slice.
struct DropoutParams {
  double p;
  uint64_t seed;
  int64_t first_batch = 0;  // batch index of b = 0 in the whole problem
  int64_t first_head = 0;   // head index of h = 0 in the whole problem
};

struct Problem {
  int64_t B, H_q, H_kv, M, N, D, D_v;
  DType dtype;
  Strided q, k, v;
  // Paged cache, for one sequence: key j is in page pages[j / page_size], which replaces the batch
  // index of k and v. Null = k and v are contiguous.
  const int32_t* pages = nullptr;
  int64_t page_size = 0;
  int64_t lse_stride;  // of lse and dlse, between heads: M, or more for a slice of a problem
  MaskParams mask;
  ScoreParams score;
  DropoutParams dropout;
  // (B, H_kv, N): 1 for live keys, which the element mask and the diagonals show to at least one
  // query of the key head. Other keys, and those outside the key ranges, may hold NaN and must
  // not enter a product.
  const uint8_t* live_keys;  // null = no element mask
  int64_t
      live_keys_stride[2];  // batch and key head; 0 where the element mask does not depend on it
};

struct ForwardParams : Problem {
  Strided o;
  void* lse;  // (B, H_q, M), contiguous rows, in the compute dtype
};

struct BackwardParams : Problem {
  Strided o, d_o;
  const void* lse;
  const void* dlse;  // (B, H_q, M), strides as lse; null = zero
  Strided dq, dk, dv;
  Strided dbias;  // same shape and dtype as the bias; data null = not needed
  int64_t bias_size[4];
};

// Packed sequences: sequence b has rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1 of q, and of k and
// v.
struct Varlen {
  int64_t B;
  const int32_t* cu_seqlens_q;  // (B + 1)
  const int32_t* cu_seqlens_k;  // (B + 1)
  bool bottom_right;  // adds each sequence's own N - M to the diagonals and the ALiBi offset
};

}  // namespace tk
