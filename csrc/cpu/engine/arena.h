// Bump allocator over a workspace. Without memory it only counts bytes, so that one layout function
// both measures a workspace and lays it out.
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
TK_INLINE T* allocate(Arena& arena, int64_t count) {
  T* const array = arena.base ? reinterpret_cast<T*>(arena.base + arena.used) : nullptr;
  arena.used += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  return array;
}

}  // namespace tk::cpu
