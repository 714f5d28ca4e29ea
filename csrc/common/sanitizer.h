// AddressSanitizer: red zones in memory that this project divides up itself.
#pragma once

#include <cstddef>

#include "common/macros.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TK_ADDRESS_SANITIZER
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define TK_ADDRESS_SANITIZER
#endif

#ifdef TK_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#endif

namespace tk {

#ifdef TK_ADDRESS_SANITIZER
constexpr bool kAddressSanitizer = true;
constexpr size_t kRedZone = 64;

// Makes the first `bytes` of `memory` accessible and the others, up to `capacity`, a red zone.
TK_INLINE void mark_red_zone(const void* memory, size_t bytes, size_t capacity) {
  ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
  ASAN_POISON_MEMORY_REGION(static_cast<const char*>(memory) + bytes, capacity - bytes);
}
#else
constexpr bool kAddressSanitizer = false;
constexpr size_t kRedZone = 0;
TK_INLINE void mark_red_zone(const void*, size_t, size_t) {}
#endif

}  // namespace tk
