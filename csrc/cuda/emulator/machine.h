// Blocks that run, their threads, and who runs next. The emulator's own; kernels see core.h.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "cuda/emulator/core.h"
#include "cuda/emulator/device.h"
#include "cuda/emulator/fiber.h"
#include "cuda/emulator/memory.h"
#include "cuda/emulator/race.h"
#include "cuda/emulator/sm90.h"

namespace tk::emulator {

constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / kWarp;
constexpr int kBarriers = 16;

enum class State : uint8_t { kReady, kTogether, kBarrier, kMBarrier, kSpin, kDone };

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
  uint8_t barrier;    // where it waits
  uint32_t mbarrier;  // the same, by its address
  const char* doing;  // what it waits in
  Site site;
  CopyQueue copies;
};

// Lanes that wait for others of a collective. Parts of a warp may wait in different ones.
struct Meeting {
  const Collective* what;
  uint32_t lanes, arrived;
  Site site;
};

struct Warp {
  uint32_t ready, spinning, done;
  uint32_t priority;
  int rotation;  // where the search for the next lane begins
  int meetings;
  Meeting meeting[kWarp];  // each has a lane of its own that waits
  void* operand[kWarp];
};

struct Barrier {
  unsigned expected, arrived;
  const char* name;
  Site site;
};

struct Block {
  dim3 index;
  unsigned number;  // in the order in which blocks start
  int thread_count, warp_count, alive;
  Stacks stacks;
  SharedMemory shared;
  BlockRaces races;
  Sm90 sm90;
  std::unique_ptr<Thread[]> threads;
  Warp warps[kMaxWarps];
  Barrier barriers[kBarriers];
  std::vector<int> arrivals[kBarriers];  // threads, where races are looked for
};

// The current thread is not ready until somebody says so.
void wait_in(State state, const char* doing, Site site);

enum class Order : uint8_t { kAscending, kDescending, kRandom };

// When copies by TMA arrive: when nothing else can happen, as soon as a thread waits, or at random.
enum class Arrival : uint8_t { kLate, kSoon, kRandom };

class Machine {
 public:
  void run(const Launch& launch);
  const Launch& launched() const { return launch_; }
  Order order() const { return order_; }
  uint64_t random();

  // Lets others run. The current thread goes on when it is ready and its turn comes.
  void yield();
  // Where the order is random: perhaps lets others run.
  void perhaps_yield();
  // What others spin for may have come.
  void progress() { idle_rounds_ = 0; }
  // Keeps the error for the caller of launch() and leaves the current thread for good.
  [[noreturn]] void leave(std::string error);
  // The same where only the address after the instruction is known.
  [[noreturn]] void leave(const void* code, std::string error);
  uint64_t switches() const { return switches_; }

 private:
  static void thread_entry();
  void start_block();
  void retire(size_t slot);
  Thread* pick_anywhere();
  Thread* pick_in(Block& block);
  Thread* pick_lane(Block& block, int warp);
  bool wake_spinning();
  bool deliver_somewhere();
  bool is_time_to_deliver();
  std::string stuck();

  Launch launch_;
  Order order_;
  Arrival arrival_;
  unsigned residents_, started_, blocks_;
  std::vector<std::unique_ptr<Block>> resident_, spare_;
  bool elsewhere_;  // go on with another block, if there is one
  int idle_rounds_;
  uint64_t switches_ = 0;
  void* main_stack_pointer_;
  uint64_t random_state_;
  std::string error_;
  const void* error_code_;
};

extern Machine machine;
extern Thread* current;  // null outside of kernels

std::string describe(Site site);
std::string describe(const Block& block);
// What each thread of the block waits for, a line for each group of threads.
std::string describe_threads(const Block& block);
void wake_barrier(Block& block, int id);

}  // namespace tk::emulator
