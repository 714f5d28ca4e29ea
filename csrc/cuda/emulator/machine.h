// One multiprocessor that runs one block: its threads, and who runs next. The emulator's own;
// kernels see core.h.
#pragma once

#include <string>
#include <vector>

#include "core.h"
#include "fiber.h"

namespace tk::emulator {

constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / kWarp;
constexpr int kBarriers = 16;

enum class State : uint8_t { kReady, kTogether, kBarrier, kSpin, kDone };

struct CopyLater {
  unsigned char* shared;
  const unsigned char* global;
  bool there;
  unsigned char bytes[16];  // as they were at issue
  Site site;
};

struct Thread {
  void* stack_pointer;
  State state;
  uint8_t barrier;    // where it waits
  const char* doing;  // the instruction that it waits in
  Site site;
  std::vector<CopyLater> copies;  // in order of issue
  std::vector<int> committed;     // copies in each group that was committed, oldest first
};

// Lanes on their way to a collective. Sets of lanes that do not meet may wait for different ones.
struct Meeting {
  const Collective* what;
  uint32_t lanes, arrived;
  Site site;
};

struct Warp {
  uint32_t ready, spinning, done;
  uint32_t priority;
  int meetings;
  Meeting meeting[kWarp];
  void* operand[kWarp];
};

struct Barrier {
  unsigned expected, arrived;
  const char* name;
  Site site;
};

class Machine {
 public:
  void run(const Launch& launch);

  void together(const Collective& what, uint32_t lanes, void* operand, Site site);
  void barrier(int id, unsigned threads, bool wait, const char* name, Site site);
  void spin(const char* name, Site site);
  [[noreturn]] void fail(std::string message);

  Thread& thread(int index) { return threads_[index]; }
  Thread& current() { return threads_[current_]; }
  int current_index() const { return current_; }
  bool running() const { return current_ >= 0; }
  uint64_t random();

 private:
  static void fiber_entry();
  void run_block();
  void switch_to(int next);
  void go_on_with_another();
  int pick();
  int pick_lane(int warp);
  int pick_warp();
  void wake_barrier(int id);
  void finish_thread();
  void draw_priorities();
  std::string deadlock();

  Launch launch_;
  Stacks stacks_;
  Thread threads_[kMaxThreads];
  Warp warps_[kMaxWarps];
  Barrier barriers_[kBarriers];
  int warp_count_;
  int current_ = -1;  // -1: the caller of launch
  int alive_;
  int idle_rounds_;
  void* main_stack_pointer_;
  uint64_t random_state_;
  std::string error_;
  int order_;
};

Machine& machine();
std::string describe(Site site);

}  // namespace tk::emulator
