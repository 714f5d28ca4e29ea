// Race detector: a vector clock for each thread of a block, and the latest accesses to each 16-byte
// granule. Barriers, __syncwarp, release and acquire order accesses; shuffles and mma do not.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "emulator/core.h"

namespace tk::emulator {

struct Block;

// Asynchronous accesses are those of TMA and wgmma, which see generic writes only after
// fence.proxy.async.
enum class Access : uint8_t { kRead, kWrite, kAtomic, kAsyncRead, kAsyncWrite };

// Source location of an access or, if that is unknown, the address after the instruction.
struct Location {
  Site site{nullptr, 0};
  const void* code = nullptr;
};

struct Record {
  Location location;
  unsigned block;
  uint32_t step;  // clock of the thread
  int thread;
  uint16_t bytes;  // bit mask of the bytes of the granule
  Access access;
};
using Records = std::vector<Record>;

using Clock = std::vector<uint32_t>;

// Vector clock of one block: the last observed step of each thread, and the last step that is
// covered by fence.proxy.async.
struct BlockClocks {
  Clock all, fenced;
};
// Vector clocks of several blocks, by block number. Null: empty.
using SharedClocks = std::shared_ptr<const std::map<unsigned, BlockClocks>>;

// Clocks of one thread.
struct ThreadClocks {
  BlockClocks own_block;
  SharedClocks other_blocks;
  SharedClocks at_fence;         // at its latest __threadfence, own block included
  SharedClocks pending_acquire;  // read by relaxed atomics; takes effect at the next fence
};

// One step of an asynchronous copy or product. Each has a virtual thread index.
struct Step {
  int thread = -1;
  uint32_t step = 0;
};

struct BlockRaces {
  std::vector<ThreadClocks> threads;  // followed by the asynchronous operations
  std::vector<Records> shared;        // by granule
  int next_async = 0;
};

// Limit of asynchronous operations in flight; beyond it, virtual threads are reused.
constexpr int kAsyncClocks = 128;

class Races {
 public:
  bool on = false;          // true if the current launch detects races
  bool in_handler = false;  // guards against instrumented templates of the emulator
  pthread_t thread;         // OS thread that runs the launch

  void begin_launch(bool enabled);
  void begin_block(Block& block);

  // Records an access by `actor`: a thread or, from thread_count on, an asynchronous operation.
  void access(const void* address, size_t bytes, Access access, const Location& location,
              int actor);
  void access(const void* address, size_t bytes, Access access, const Location& location);
  // Barrier: the clocks of all `arrived` threads are joined into those of the `waited` threads.
  void synchronize(Block& block, const std::vector<int>& arrived, const std::vector<int>& waited);
  void synchronize_lanes(uint32_t lanes);
  void release(const void* address);
  void acquire(const void* address);
  void fence();
  // A relaxed read-modify-write. It orders accesses only together with fences.
  void relaxed(const void* address, size_t bytes, const Location& location);
  // How a float atomicAdd is recorded; see Settings::ordered_sums.
  Access float_add_access() const;

  // Release and acquire of the clocks of the current thread.
  void publish(SharedClocks& known);
  void observe(const SharedClocks& known);
  void merge(SharedClocks& into, const SharedClocks& known);
  // Starts an asynchronous operation that is ordered after the current thread.
  Step begin_async();
  // Orders the operation after the current thread as well.
  void continue_async(Step step);
  // Orders the end of the operation before later accesses of `thread`, or of observers of `known`.
  void end_async(Block& block, Step step, int thread);
  void end_async(Block& block, Step step, SharedClocks& known);
  // fence.proxy.async.
  void fence_async();

 private:
  void check(Records& records, const Record& record, const ThreadClocks& known,
             const void* address);
  Records& records_of(const void* address);
  void check_extent(const void* address, size_t bytes, Access access, const Location& location);

  std::unordered_map<uintptr_t, Records> global_;
  std::unordered_map<const void*, SharedClocks> released_;
};

extern Races races;

}  // namespace tk::emulator
