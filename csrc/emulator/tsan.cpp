// Hooks called by code compiled with -fsanitize=thread. The compiler's own runtime is not linked.
#include <cstddef>

#include "emulator/machine.h"

namespace {

using tk::emulator::Access;

inline void record(const void* address, size_t bytes, Access access, const void* code) {
  using namespace tk::emulator;
  if (!races.on || !current || races.in_handler || !pthread_equal(pthread_self(), races.thread))
    return;
  races.in_handler = true;
  races.access(address, bytes, access, {{nullptr, 0}, code});
  races.in_handler = false;
}

}  // namespace

#define TK_RETURN_ADDRESS __builtin_return_address(0)
#define TK_SIZED(bytes)                                                                      \
  void __tsan_read##bytes(void* at) { record(at, bytes, Access::kRead, TK_RETURN_ADDRESS); } \
  void __tsan_write##bytes(void* at) { record(at, bytes, Access::kWrite, TK_RETURN_ADDRESS); }
#define TK_UNALIGNED(bytes)                               \
  void __tsan_unaligned_read##bytes(void* at) {           \
    record(at, bytes, Access::kRead, TK_RETURN_ADDRESS);  \
  }                                                       \
  void __tsan_unaligned_write##bytes(void* at) {          \
    record(at, bytes, Access::kWrite, TK_RETURN_ADDRESS); \
  }

extern "C" {

TK_SIZED(1)
TK_SIZED(2)
TK_SIZED(4)
TK_SIZED(8)
TK_SIZED(16)
TK_UNALIGNED(2)
TK_UNALIGNED(4)
TK_UNALIGNED(8)
TK_UNALIGNED(16)

void __tsan_read_range(void* at, size_t bytes) {
  record(at, bytes, Access::kRead, TK_RETURN_ADDRESS);
}
void __tsan_write_range(void* at, size_t bytes) {
  record(at, bytes, Access::kWrite, TK_RETURN_ADDRESS);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// Clang calls these for memory functions that it does not inline.
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  if (bytes) record(from, bytes, Access::kRead, TK_RETURN_ADDRESS);
  if (bytes) record(to, bytes, Access::kWrite, TK_RETURN_ADDRESS);
  return __builtin_memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  if (bytes) record(from, bytes, Access::kRead, TK_RETURN_ADDRESS);
  if (bytes) record(to, bytes, Access::kWrite, TK_RETURN_ADDRESS);
  return __builtin_memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  if (bytes) record(to, bytes, Access::kWrite, TK_RETURN_ADDRESS);
  return __builtin_memset(to, value, bytes);
}
}
