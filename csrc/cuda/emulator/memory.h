// The shared memory of a block, and asynchronous copies to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/emulator/core.h"

namespace tk::emulator {

constexpr size_t kSharedAlignment = 128;  // what TK_SHARED_MEMORY promises
constexpr unsigned char kPoison = 0xff;   // all bytes so: a NaN in every format

// Between pages that cannot be read.
class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(const SharedMemory&) = delete;
  ~SharedMemory();

  // All poison; `shift` times the alignment before the end of what can be read.
  void begin(size_t bytes, size_t shift);
  // Whether bytes close before or behind it were written.
  bool trespassed() const;

  unsigned char* base() const { return base_; }
  size_t size() const { return size_; }
  uint32_t address(const void* shared) const;
  unsigned char* at(uint32_t address) const { return window_ + address; }
  bool contains(const void* address) const;
  // Also the edges and the pages that cannot be read.
  bool surrounds(const void* address) const;

 private:
  unsigned char* window_ = nullptr;
  unsigned char* base_ = nullptr;
  size_t size_ = 0;
};

struct CopyLater {
  unsigned char* shared;
  const unsigned char* global;
  bool there;
  unsigned char bytes[16];  // as they were at issue
  Site site;
};

// Those of one thread, oldest first, and how many are in each group that was committed.
struct CopyQueue {
  std::vector<CopyLater> copies;
  std::vector<int> groups;
  int uncommitted = 0;
};

}  // namespace tk::emulator
