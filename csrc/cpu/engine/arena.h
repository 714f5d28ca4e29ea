// Bump allocator over a workspace. Without memory it only counts bytes, so that one layout function
// both measures a workspace and lays it out.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/macros.h"
#include "common/sanitizer.h"

namespace tk::cpu {

constexpr size_t kAlignment = 64;

struct Arena {
  char* base = nullptr;
  size_t used = 0;
};

template <typename T>
TK_INLINE T* allocate(Arena& arena, int64_t count) {
  const size_t bytes = static_cast<size_t>(count) * sizeof(T);
  const size_t capacity = (bytes + kRedZone + kAlignment - 1) / kAlignment * kAlignment;
  T* const array = arena.base ? reinterpret_cast<T*>(arena.base + arena.used) : nullptr;
  if (array) mark_red_zone(array, bytes, capacity);
  arena.used += capacity;
  return array;
}

}  // namespace tk::cpu
