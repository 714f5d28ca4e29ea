// A workspace: one allocation divided into arrays. Plain C++.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tk::cuda {

// Allocates arrays in order from `memory`. With null it only counts the bytes.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <typename T>
  T* take(int64_t count) {
    char* const taken = memory_ ? memory_ + bytes_ : nullptr;
    bytes_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(taken);
  }

  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kAlignment = 256;
  char* memory_;
  size_t bytes_ = 0;
};

}  // namespace tk::cuda
