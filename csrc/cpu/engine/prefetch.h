// Software prefetch into L1.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace tk::cpu::TK_ISA {

constexpr int64_t kLineBytes = 64;

// Prefetches the line `ahead` bytes past `data`; the address may lie past the end of the array.
TK_INLINE void prefetch(const void* data, int64_t ahead) {
  __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<intptr_t>(data) + ahead));
}

// Likewise into the L2 cache only. A core waits for few lines of its L1 cache at a time, and for
// more of its L2 cache.
TK_INLINE void prefetch_to_l2(const void* data, int64_t ahead) {
  __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<intptr_t>(data) + ahead), 0, 2);
}

// Prefetches `bytes` bytes from there on.
TK_INLINE void prefetch(const void* data, int64_t ahead, int64_t bytes) {
  for (int64_t n = 0; n < bytes; n += kLineBytes) prefetch(data, ahead + n);
}

}  // namespace tk::cpu::TK_ISA
