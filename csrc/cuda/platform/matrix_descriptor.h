// Operands of wgmma in shared memory.
#pragma once

#include "cuda/platform/sm80_ptx.h"
#include "cuda/platform/tensor_box.h"

namespace tk::cuda {

// Descriptor of a matrix in shared memory, in chunks of 16 bytes. A swizzled row has w = 2, 4 or 8
// chunks, an unswizzled one w = 1. Byte offset of a chunk:
//   kK:  chunk k / 8 of row r       stride (r / 8) + 16 w (r % 8) + 16 (k / 8)
//   kMN: chunk n = mn / 8 of row k  leading (n / w) + 16 (n % w) + stride (k / 8) + 16 w (k % 8)
// Without a swizzle, the last term of kK is leading (k / 8), and kMN is stride n + leading (k / 8)
// + 16 (k % 8). Swizzled matrices are aligned to 128 w bytes; a descriptor may be advanced along k.
TK_DEVICE uint64_t matrix_descriptor(const void* shared, uint32_t leading_bytes,
                                     uint32_t stride_bytes, Swizzle swizzle) {
  const uint64_t start = (shared_address(shared) & 0x3ffffu) >> 4;
  return start | static_cast<uint64_t>((leading_bytes & 0x3ffffu) >> 4) << 16 |
         static_cast<uint64_t>((stride_bytes & 0x3ffffu) >> 4) << 32 |
         static_cast<uint64_t>(swizzle) << 62;
}

}  // namespace tk::cuda
