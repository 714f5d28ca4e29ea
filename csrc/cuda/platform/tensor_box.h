// Description of a TMA tensor map: a tensor of up to five dimensions and the box that one copy
// moves.
#pragma once

#include <cstdint>

namespace tk::cuda {

// Swizzle: permutes the 16-byte chunks within rows of 32, 64 or 128 bytes, so that a column of
// eight rows falls into different banks. The values are those of wgmma matrix descriptors.
enum class Swizzle : uint8_t { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

enum class TensorType : uint8_t { kHalf, kBFloat16, kFloat };

constexpr int kTensorRank = 5;

struct TensorBox {
  void* data;  // 16-byte aligned
  TensorType type;
  int rank;
  uint64_t size[kTensorRank];    // elements, innermost first
  uint64_t stride[kTensorRank];  // bytes, multiples of 16; stride[0] is the size of an element
  uint32_t box[kTensorRank];     // elements; with a swizzle, box[0] fills one swizzled row
  Swizzle swizzle;
};

}  // namespace tk::cuda
