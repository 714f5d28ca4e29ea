// Shared memory of a block, and cp.async copies to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulator/core.h"

namespace tk::emulator {

constexpr size_t kSharedAlignment = 128;  // alignment that TK_SHARED_MEMORY guarantees
constexpr unsigned char kPoison = 0xff;   // repeated, a NaN in every float format

// Shared memory between inaccessible guard pages.
class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(const SharedMemory&) = delete;
  ~SharedMemory();

  // Fills the memory with poison. It ends `shift` * kSharedAlignment bytes before the guard pages.
  void begin(size_t bytes, size_t shift);
  // True if bytes just before or just after the shared memory were written.
  bool written_outside() const;

  unsigned char* base() const { return base_; }
  size_t size() const { return size_; }
  uint32_t address(const void* shared) const;
  unsigned char* at(uint32_t address) const { return window_ + address; }
  bool contains(const void* address) const;
  // True for shared memory, its red zones and its guard pages.
  bool in_guarded_range(const void* address) const;

 private:
  unsigned char* window_ = nullptr;
  unsigned char* base_ = nullptr;
  size_t size_ = 0;
};

struct AsyncCopy {
  unsigned char* shared;
  const unsigned char* global;
  bool valid;
  unsigned char bytes[16];  // source at issue
  Site site;
};

// Pending cp.async copies of one thread, oldest first, and the size of each committed group.
struct CopyQueue {
  std::vector<AsyncCopy> copies;
  std::vector<int> groups;
  int uncommitted = 0;
};

}  // namespace tk::emulator
