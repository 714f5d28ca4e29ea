// Kernel parameters: plain structs without torch types. Symbols as in docs/attention.md.
#pragma once

#include <cstdint>

#include "common/fields.h"

namespace tk {

enum class DType : uint8_t { kFloat16, kBFloat16, kFloat32, kFloat64 };

// A four-dimensional tensor. Strides count elements; broadcast dimensions may have stride 0.
struct Strided {
  void* data = nullptr;
  int64_t stride[4] = {};
};

// Element (i, j) is visible if i + diagonal_low <= j <= i + diagonal_high and every constraint
// whose pointer is not null holds. dense, blocks, selected and position tests form the element
// mask.
struct MaskParams {
  int64_t diagonal_low;
  int64_t diagonal_high;
  const int64_t* key_start = nullptr;  // (B): start <= j
  const int64_t* key_end = nullptr;    // (B): j < end
  // Position tests: q_low <= k_position <= q_high, on the circle of 64-bit integers.
  const int64_t* q_low = nullptr;       // (tests, B, H_q, M)
  const int64_t* q_high = nullptr;      // (tests, B, H_q, M)
  const int64_t* k_position = nullptr;  // (tests, B, H_q, N)
  int64_t tests = 0;
  int64_t q_position_stride[3] = {};  // test, batch, head; 0 where they share positions
  int64_t k_position_stride[3] = {};
  const uint8_t* dense = nullptr;  // (B, H_q, M, N)
  int64_t dense_stride[4] = {};
  const uint8_t* blocks = nullptr;  // (H_q, ceil(M / block_size), ceil(N / block_size))
  int64_t blocks_stride[3] = {};
  int64_t block_size = 0;
  // Lists of blocks of selected_size keys, ascending; negative entries select nothing. CPU only.
  const int32_t* selected = nullptr;  // (B, H_q, M, selected_count)
  int64_t selected_stride[2] = {};    // batch, head; 0 where they share lists
  int64_t selected_count = 0;
  int64_t selected_size = 0;
  // Visibility per 64 x 64 block under the element mask (mask.h); null without an element mask.
  uint8_t* block_mask = nullptr;
  int64_t block_mask_stride[3] = {};  // batch, head, block row; block columns are contiguous
};

// The numbers among the score options.
struct ScoreNumbers {
#define TK_NUMBER(type, kind, name, layouts) Number<type>::Param name;
  TK_SCORE_FIELDS(TK_NUMBER, TK_NO_FIELD)
#undef TK_NUMBER
};

// Score options: docs/attention.md, section 2.
struct ScoreParams : ScoreNumbers {
  Strided bias;  // data null = no bias
  DType bias_dtype;
  const void* alibi_slopes;  // (1 or S, H_q), in the compute dtype; null = none
  int64_t alibi_stride;      // 0: all sequences share the slopes
  // (1 or H_q, distances), in the compute dtype; null = none. Score (i, j) of head h gets element
  // h relative_stride + i + relative_offset - j.
  const void* relative_bias;
  int64_t relative_stride;  // 0: all heads share the table
  int64_t relative_offset;  // of relative_keys too
  int64_t distances;
  // (1 or H_q, distances, D), in q's dtype; null = none. Score (i, j) of head h has the product of
  // q_i and row h relative_keys_stride + i + relative_offset - j.
  const void* relative_keys;
  int64_t relative_keys_stride;  // 0: all heads share the table
};

// Random bits of dropout. If the problem is a slice of a larger one, they are those of the slice.
struct DropoutParams {
  uint64_t seed;
  int64_t first_batch = 0;   // batch index of b = 0 in the whole problem
  int64_t first_head = 0;    // head index of h = 0 in the whole problem
  int64_t first_row = 0;     // query index of i = 0 in the whole problem, a multiple of 16
  int64_t first_column = 0;  // key index of j = 0 in the whole problem, a multiple of 16
};

struct Problem {
  int64_t B, H_q, H_kv, M, N, D, D_v;
  DType dtype;
  Strided q, k, v;
  // With scales k and v are int8, and key j of head h is k_scale[b, h, j] k[b, h, j]. CPU only.
  bool is_int8 = false;
  Strided k_scale, v_scale;  // (B, H_kv, N) float32, paged like k and v
  // Set to false by a scale in use that is negative or not finite.
  bool* scales_are_valid = nullptr;
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
  // Like lse: its rounding error, 0 for fully masked rows; null = not needed
  void* lse_rest = nullptr;
};

struct BackwardParams : Problem {
  Strided o, d_o;
  const void *lse, *lse_rest;  // of the forward pass
  const void* dlse;            // (B, H_q, M), strides as lse; null = zero
  Strided dq, dk, dv;
  Strided dbias;  // same shape and dtype as the bias; data null = not needed
  int64_t bias_size[4];
  // Like relative_bias and relative_keys; null = not needed
  void* drelative_bias;
  void* drelative_keys;
  // (B, H_q, M + N - 1): ds summed by distance, the terms of drelative_bias; set by cpu/driver
  void* distance_sums;
  // (B, H_q, M + N - 1, D): the same of drelative_keys
  void* key_sums;
};

// Packed sequences: sequence b has rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1 of q, and of k and
// v.
struct Varlen {
  int64_t B;
  const int32_t* cu_seqlens_q;  // (B + 1)
  const int32_t* cu_seqlens_k;  // (B + 1)
  bool bottom_right;  // adds each sequence's own N - M to the diagonals and offsets of distances
};

// Key/value cache of a decoding model: contiguous (B, H_kv, capacity, width) or paged. The pages of
// packed sequences too: the fields from page_size to max_pages.
struct KVCache {
  // (B): valid positions per sequence, later ones are undefined; null = all are valid
  const int32_t* cache_seqlens = nullptr;
  int64_t page_size = 0;  // 0: not paged, k and v are (B, H_kv, N, width)
  int64_t pages = 0;
  // (B, max_pages): position j of sequence b is in page block_table[b, j / page_size]. Entries past
  // the last page in use may hold anything.
  const int32_t* block_table = nullptr;
  int64_t max_pages = 0;
  bool bottom_right = false;  // as in Varlen, where N is the cache_seqlens entry
};

// The place of each sequence's rows.
enum class LayoutKind : uint8_t { kDense, kVarlen, kCache };

struct LayoutParams {
  LayoutKind kind = LayoutKind::kDense;
  bool has_packed_pages() const { return kind == LayoutKind::kVarlen && cache.page_size > 0; }
  Varlen varlen{};
  KVCache cache{};
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;  // M and N of a dense call
};

}  // namespace tk
