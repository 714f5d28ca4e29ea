// Accesses that nothing orders: a vector clock for each thread of a block, and for each 16 bytes
// the latest accesses. Barriers, __syncwarp, release and acquire order; shuffles and mma do not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core.h"

namespace tk::emulator {

struct Block;

enum class Access : uint8_t { kRead, kWrite, kAtomic };

// In the source; where that is not known, the address after the instruction.
struct Where {
  Site site{nullptr, 0};
  const void* code = nullptr;
};

struct Record {
  Where where;
  unsigned block;
  uint32_t step;  // of the thread
  int thread;
  uint16_t bytes;  // of the 16, a bit each
  Access access;
};
using Records = std::vector<Record>;

// What is known of the threads of one block: up to which step of each.
using Clock = std::vector<uint32_t>;
// The same of several blocks, by number; null: nothing.
using Known = std::shared_ptr<const std::map<unsigned, Clock>>;

// Of one thread.
struct Knowledge {
  Clock here;
  Known elsewhere;
  Known at_fence;  // at its latest __threadfence, this block too
  Known read;      // from relaxed atomics, if a fence follows
};

struct BlockRaces {
  std::vector<Knowledge> threads;  // then the asynchronous copies
  std::vector<Records> shared;     // for each 16 bytes
};

// More copies than this in flight would be taken for one another.
constexpr int kCopyClocks = 64;

class Races {
 public:
  bool on = false;    // whether the launch that runs looks for them
  bool busy = false;  // the emulator's own templates may be instrumented too

  void begin_launch(bool look);
  void begin_block(Block& block);

  // By a thread of the block or, from thread_count on, by an asynchronous copy.
  void access(const void* address, size_t bytes, Access access, const Where& where, int actor);
  void access(const void* address, size_t bytes, Access access, const Where& where);
  // Threads of a block have met: those that waited know what all know.
  void meet(Block& block, const std::vector<int>& arrived, const std::vector<int>& waited);
  void meet_lanes(uint32_t lanes);
  void release(const void* address);
  void acquire(const void* address);
  void fence();
  // A relaxed read-modify-write, which orders only together with fences.
  void relaxed(const void* address, size_t bytes, const Where& where);

 private:
  void check(Records& records, const Record& mine, const Knowledge& known, const void* address);
  Records& records_of(const void* address);

  std::unordered_map<uintptr_t, Records> global_;
  std::unordered_map<const void*, Known> released_;
};

extern Races races;

}  // namespace tk::emulator
