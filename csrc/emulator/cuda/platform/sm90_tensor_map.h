// Emulated TensorMap, which stores the fields of the TensorBox.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/platform/tensor_box.h"

namespace tk::cuda {

struct TensorMap {
  uint64_t words[16];
};

inline size_t element_bytes(TensorType type) { return type == TensorType::kFloat ? 4 : 2; }

// Chunks of 16 bytes in a swizzled row.
inline unsigned swizzle_chunks(Swizzle swizzle) {
  return swizzle == Swizzle::kNone ? 1 : 16u >> static_cast<int>(swizzle);
}

// Throws std::runtime_error for a box that the driver refuses.
TensorMap encode(const TensorBox& tensor);

// The inverse of encode(). Rank 0: not a tensor map.
TensorBox decode(const TensorMap& map);

}  // namespace tk::cuda
