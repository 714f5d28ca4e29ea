// Stacks of their own for the threads of a block, and the switch between them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tk::emulator {

constexpr size_t kStackBytes = 128 * 1024;

// Stacks in one range of addresses, an unreadable page below each. They live as long as the
// process.
class Stacks {
 public:
  Stacks() = default;
  Stacks(const Stacks&) = delete;
  ~Stacks();

  // Throws std::bad_alloc.
  void reserve(int count);
  // The stack pointer of a fiber that starts with entry(), which must not return.
  void* prepare(int index, void (*entry)());
  bool contains(const void* address) const;
  // The fiber below whose stack the address is; -1: none.
  int overflowed(const void* address) const;

 private:
  char* begin_ = nullptr;
  int count_ = 0;
};

}  // namespace tk::emulator

extern "C" {
// Keeps the registers that calls preserve on the present stack, whose pointer goes to *from.
void tk_emulator_switch(void** from, void* to) __asm__("tk_emulator_switch");
}
