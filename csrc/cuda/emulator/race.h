// Accesses that nothing orders: a vector clock for each thread of a block, and for each 16 bytes
// the latest accesses. Barriers, __syncwarp, release and acquire order; shuffles and mma do not.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/emulator/core.h"

namespace tk::emulator {

struct Block;

// The asynchronous ones are those of TMA and wgmma, which see what others wrote only after a
// fence.proxy.async.
enum class Access : uint8_t { kRead, kWrite, kAtomic, kAsyncRead, kAsyncWrite };

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

using Clock = std::vector<uint32_t>;

// Up to which step of each thread of a block something is known, and known to have been fenced.
struct Seen {
  Clock all, fenced;
};
// The same of several blocks, by number; null: nothing.
using Known = std::shared_ptr<const std::map<unsigned, Seen>>;

// Of one thread.
struct Knowledge {
  Seen here;
  Known elsewhere;
  Known at_fence;  // at its latest __threadfence, this block too
  Known read;      // from relaxed atomics, if a fence follows
};

// One step of an asynchronous copy or product, which counts as a thread.
struct Step {
  int thread = -1;
  uint32_t step = 0;
};

struct BlockRaces {
  std::vector<Knowledge> threads;  // then what runs asynchronously
  std::vector<Records> shared;     // for each 16 bytes
  int next_async = 0;
};

// More than this in flight would be taken for one another.
constexpr int kAsyncClocks = 128;

class Races {
 public:
  bool on = false;    // whether the launch that runs looks for them
  bool busy = false;  // the emulator's own templates may be instrumented too
  pthread_t thread;   // of the system, that runs the launch

  void begin_launch(bool look);
  void begin_block(Block& block);

  // By a thread of the block or, from thread_count on, something asynchronous.
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
  // Of an addition of floats.
  Access sum() const;

  // What the current thread knows, for others to learn.
  void tell(Known& known);
  void learn(const Known& known);
  void merge(Known& into, const Known& known);
  // Something asynchronous that knows what the current thread knows.
  Step begin_async();
  // The current thread adds to it.
  void go_on_async(Step step);
  // It ends before what a thread, or whoever learns of `known`, does after this.
  void end_async(Block& block, Step step, int thread);
  void end_async(Block& block, Step step, Known& known);
  // fence.proxy.async.
  void fence_async();

 private:
  void check(Records& records, const Record& record, const Knowledge& known, const void* address);
  Records& records_of(const void* address);
  void check_extent(const void* address, size_t bytes, Access access, const Where& where);

  std::unordered_map<uintptr_t, Records> global_;
  std::unordered_map<const void*, Known> released_;
};

extern Races races;

}  // namespace tk::emulator
