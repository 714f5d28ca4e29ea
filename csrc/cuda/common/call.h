// Device arguments of one pass, beside its params. Plain C++.
#pragma once

#include <cstdint>

#include "common/params.h"

namespace tk::cuda {

struct Call {
  // Varlen: sequences packed along the row dimension, in device memory; cu_seqlens_q is null for a
  // dense call. The problem then has B = 1, and its M and N count the rows of all sequences.
  Varlen varlen;
  int64_t max_seqlen_q, max_seqlen_k;  // of one sequence; M and N of a dense call
  const int64_t* seed;                 // in device memory; null without dropout
  void* stream;
};

}  // namespace tk::cuda
