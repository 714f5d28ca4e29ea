// Kernel table of one instruction set. kernels.cpp is compiled once per instruction set;
// driver/isa_dispatch.cpp selects one.
#pragma once

#include <cstddef>
#include <span>

#include "common/params.h"
#include "cpu/engine/workers.h"

namespace tk::cpu {

// The engine and the tiles of a forward pass.
struct Choice {
  const char* engine;
  int64_t queries, keys;
};

struct Kernels {
  Choice (*choice)(const Problem& problem);
  // Fills mask.block_mask.
  void (*fill_block_mask)(const MaskParams& mask, int64_t B, int64_t H, int64_t M, int64_t N,
                          const Workers& workers);
  // Fills live_keys, whose strides are set, from mask.block_mask.
  void (*fill_live_keys)(const Problem& problem, uint8_t* live_keys, const Workers& workers);
  // Workspace sizes are in bytes, 64-byte aligned, and O(M + N), except for the dq of each split.
  size_t (*forward_workspace)(const ForwardParams& params, const Workers& workers);
  void (*forward)(const ForwardParams& params, const Workers& workers, void* workspace);
  size_t (*backward_workspace)(const BackwardParams& params, const Workers& workers);
  void (*backward)(const BackwardParams& params, const Workers& workers, void* workspace);
  // Writes drelative_keys of a call from the key_sums of its sequences.
  void (*sum_key_gradients)(const BackwardParams& call, std::span<const BackwardParams> sequences,
                            const Workers& workers);
  // Decoding: reads k and v in place, for few queries. `decodes` is true if it is the faster path.
  // Sequences are problems of one batch entry with the same queries and heads; count >= 1.
  bool (*decodes)(const Problem& problem);
  size_t (*decode_workspace)(const ForwardParams* sequences, int64_t count, const Workers& workers);
  void (*decode)(const ForwardParams* sequences, int64_t count, const Workers& workers,
                 void* workspace);
};

namespace portable {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
// For bfloat16 only.
namespace avx512_bf16 {
extern const Kernels kKernels;
}
namespace amx {
extern const Kernels kKernels;
}

}  // namespace tk::cpu
