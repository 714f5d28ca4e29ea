// Arguments of one pass besides its params: varlen offsets, dropout seed, stream. Plain C++.
#pragma once

#include <cstdint>

#include "common/params.h"

namespace tk::cuda {

struct LaunchArgs {
  // Offsets of a varlen batch, in device memory; cu_seqlens_q is null for a dense call. A varlen
  // problem has B = 1, and its M and N count the rows of all sequences.
  Varlen varlen;
  int64_t max_seqlen_q, max_seqlen_k;  // of the longest sequence; M and N of a dense call
  const int64_t* seed;                 // dropout seed in device memory; null without dropout
  void* stream;
};

}  // namespace tk::cuda
