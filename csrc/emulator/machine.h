// Scheduler of the emulator: resident blocks, their warps and threads, and the choice of the next
// thread. Internal; kernels include core.h.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "cuda/platform/device.h"
#include "emulator/core.h"
#include "emulator/fiber.h"
#include "emulator/memory.h"
#include "emulator/race.h"
#include "emulator/sm90.h"

namespace tk::emulator {

constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / kWarp;
constexpr int kBarriers = 16;

enum class State : uint8_t { kReady, kCollective, kBarrier, kMBarrier, kSpin, kDone };

constexpr uint32_t kNoMBarrier = ~0u;

struct Block;
struct Warp;

struct Thread {
  void* stack_pointer;
  Block* block;
  Warp* warp;
  int index;     // in the block
  uint32_t bit;  // of its lane
  State state;
  uint8_t barrier;        // named barrier it waits at
  uint32_t mbarrier;      // address of the mbarrier it waits at
  const char* operation;  // instruction it waits in
  Site site;
  CopyQueue copies;
};

// A collective that some lanes have reached. Parts of a warp may wait in different collectives.
struct PendingCollective {
  const Collective* collective;
  uint32_t lanes, arrived;
  Site site;
};

struct Warp {
  uint32_t ready, spinning, done;
  uint32_t priority;
  int rotation;  // lane at which the search for the next lane begins
  int pending_count;
  PendingCollective pending[kWarp];  // at most one for each waiting lane
  void* operand[kWarp];
};

struct Barrier {
  unsigned expected, arrived;
  const char* name;
  Site site;
};

struct Block {
  dim3 index;
  unsigned number;  // linear block index
  int thread_count, warp_count, alive;
  Stacks stacks;
  SharedMemory shared;
  BlockRaces races;
  Sm90 sm90;
  std::unique_ptr<Thread[]> threads;
  Warp warps[kMaxWarps];
  Barrier barriers[kBarriers];
  std::vector<int> arrivals[kBarriers];  // thread indices; only with race detection
};

// Marks the current thread as waiting. It stays so until another thread makes it ready.
void set_waiting(State state, const char* operation, Site site);

enum class Order : uint8_t { kAscending, kDescending, kRandom };

// When TMA loads complete: when no thread can run, at the next yield, or at random.
enum class Arrival : uint8_t { kLate, kSoon, kRandom };

class Machine {
 public:
  void run(const Launch& launch);
  const Launch& launched() const { return launch_; }
  Order order() const { return order_; }
  uint64_t random();

  // Switches to the next thread. Returns when the current thread is ready and scheduled again.
  void yield();
  // With a random order, yields with probability 1/8.
  void maybe_yield();
  // Resets the deadlock detector: memory that other threads poll may have changed.
  void note_progress() { idle_rounds_ = 0; }
  // Records the error for launch() to throw, and never resumes the current thread.
  [[noreturn]] void abort_launch(std::string error);
  // The same with the address after the failing instruction instead of a source location.
  [[noreturn]] void abort_launch(const void* code, std::string error);
  uint64_t switches() const { return switches_; }

 private:
  static void thread_entry();
  void start_block();
  void retire(size_t slot);
  Thread* pick_thread();
  Thread* pick_thread_in(Block& block);
  Thread* pick_lane(Block& block, int warp);
  bool wake_spinning();
  bool deliver_any_load();
  bool should_deliver();
  std::string describe_deadlock();

  Launch launch_;
  Order order_;
  Arrival arrival_;
  unsigned residents_, started_, blocks_;
  std::vector<std::unique_ptr<Block>> resident_, spare_;
  bool switch_block_;  // the next yield may switch to another block
  int idle_rounds_;
  uint64_t switches_ = 0;
  void* main_stack_pointer_;
  uint64_t random_state_;
  std::string error_;
  const void* error_code_;
};

extern Machine machine;
extern Thread* current;  // nullptr outside of kernels

std::string describe(Site site);
std::string describe(const Block& block);
// The instruction that each thread waits in, one line for each group of threads in the same state.
std::string describe_threads(const Block& block);
void wake_barrier(Block& block, int id);

}  // namespace tk::emulator
