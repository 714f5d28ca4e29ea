// TensorMap on the CPU: it holds the TensorBox itself.
#pragma once

#include <cstddef>

namespace tk::cuda {

inline size_t element_bytes(TensorType type) { return type == TensorType::kFloat ? 4 : 2; }

// Chunks of 16 bytes in a swizzled row.
inline unsigned swizzle_chunks(Swizzle swizzle) {
  return swizzle == Swizzle::kNone ? 1 : 16u >> static_cast<int>(swizzle);
}

// Throws std::runtime_error for what the driver refuses.
TensorMap encode(const TensorBox& tensor);

// The inverse; rank 0: it is none.
TensorBox decode(const TensorMap& map);

}  // namespace tk::cuda
