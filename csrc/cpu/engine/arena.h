// A workspace cut into aligned arrays. Without memory it only counts, so that the same code says
// how much is needed and then lays it out.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/macros.h"

namespace tk::cpu {

constexpr size_t kAlignment = 64;

struct Arena {
  char* base = nullptr;
  size_t used = 0;
};

template <typename T>
TK_INLINE T* take(Arena& arena, int64_t count) {
  T* const array = arena.base ? reinterpret_cast<T*>(arena.base + arena.used) : nullptr;
  arena.used += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  return array;
}

}  // namespace tk::cpu
