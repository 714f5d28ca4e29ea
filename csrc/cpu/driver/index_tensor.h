// Integer tensors that hold lengths, offsets or pages. Another thread may write them during a call.
#pragma once

#include <cstdint>

#include "common/tensor_view.h"

namespace tk {

// A matrix of int32 or int64. Does not own its data.
struct IndexTensor {
  const void* data = nullptr;
  int64_t row = 0, column = 0;  // strides in elements
  bool is_64_bit = false;

  IndexTensor() = default;
  // x: (rows) or (rows, columns).
  explicit IndexTensor(const View& x)
      : data(x.data),
        row(x.stride[0]),
        column(x.dimensions == 2 ? x.stride[1] : 0),
        is_64_bit(x.element == Element::kInt64) {}

  // Reads the element once: a compiler may otherwise load it again after a check.
  int64_t at(int64_t r, int64_t c) const {
    const int64_t n = r * row + c * column;
    if (is_64_bit) return __atomic_load_n(static_cast<const int64_t*>(data) + n, __ATOMIC_RELAXED);
    return __atomic_load_n(static_cast<const int32_t*>(data) + n, __ATOMIC_RELAXED);
  }
};

}  // namespace tk
