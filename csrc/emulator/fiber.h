// Fibers: the stacks of the threads of a block, and the context switch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tk::emulator {

constexpr size_t kStackBytes = 128 * 1024;

// Stacks in one address range, each with an inaccessible guard region below it. They are reused
// until the process ends.
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
  // Index of the fiber whose guard region contains the address, or -1.
  int overflowed(const void* address) const;

 private:
  char* begin_ = nullptr;
  int count_ = 0;
};

}  // namespace tk::emulator

extern "C" {
// Saves the callee-saved registers on the current stack and its pointer in *from, then resumes
// `to`.
void tk_emulator_switch(void** from, void* to) __asm__("tk_emulator_switch");
}
