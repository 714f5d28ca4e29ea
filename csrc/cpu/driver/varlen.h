// Packed sequences of different lengths: one kernel call per sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "common/params.h"
#include "cpu/driver/index_tensor.h"

namespace tk {

// Copies the offsets, and makes `varlen` refer to the copy: another thread may write the tensors
// between the check and the use.
std::vector<int32_t> copy_offsets(Varlen& varlen, const IndexTensor& q, const IndexTensor& k);

// True if cu_seqlens (B + 1) starts at 0, does not decrease, and ends within `total` rows.
bool are_valid_offsets(const int32_t* cu_seqlens, int64_t B, int64_t total);

// True if every sequence lies within the M query rows and N key rows.
bool fits(const Varlen& varlen, int64_t M, int64_t N);

// True if no sequence has more than max_M queries or max_N keys.
bool is_bounded(const Varlen& varlen, int64_t max_M, int64_t max_N);

// `packed` has one batch entry, which holds all rows; `cache` has the pages of the keys, if they
// are in pages. Rows past the last sequence are fully masked.
void run_forward(const ForwardParams& packed, const Varlen& varlen, const KVCache& cache);
void run_backward(const BackwardParams& packed, const Varlen& varlen);

}  // namespace tk
