// Swizzled layouts of shared memory.
#pragma once

#include "cuda/platform/sm90_ptx.h"
#include "cuda/platform/sm90_tensor_map.h"

namespace tk::cuda {

TK_DEVICE unsigned char* align_to(unsigned char* shared, uint32_t alignment) {
  return shared + (-shared_address(shared) & (alignment - 1));
}

// Byte offset of 16-byte chunk c of row r. PTX manual, swizzling modes.
inline int swizzled(Swizzle mode, int r, int c) {
  switch (mode) {
    case Swizzle::k128:
      return r * 128 + (c ^ r % 8) * 16;
    case Swizzle::k64:
      return r * 64 + (c ^ r / 2 % 4) * 16;
    case Swizzle::k32:
      return r * 32 + (c ^ r / 4 % 2) * 16;
    default:
      return r * 16 + c * 16;
  }
}

inline int row_chunks(Swizzle mode) {
  return mode == Swizzle::k128 ? 8 : mode == Swizzle::k64 ? 4 : mode == Swizzle::k32 ? 2 : 1;
}

}  // namespace tk::cuda
