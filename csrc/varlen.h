// Sequences of different lengths, packed one behind another: a call of the kernels for each.
#pragma once

#include <cstdint>

#include "params.h"

namespace tk {

// Sequence b has rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1, of q and of k and v.
struct Packing {
  int64_t B;
  const int32_t* cu_seqlens_q;  // (B + 1)
  const int32_t* cu_seqlens_k;  // (B + 1)
  bool from_end;  // diagonals and ALiBi count from a sequence's own N - M, as if added to them
};

// Whether every sequence lies within the M queries and N keys of all.
bool fits(const Packing& packing, int64_t M, int64_t N);

// `packed` has one batch entry, which holds all rows. Those behind the last sequence see nothing.
void run_forward(const ForwardParams& packed, const Packing& packing);
void run_backward(const BackwardParams& packed, const Packing& packing);

}  // namespace tk
