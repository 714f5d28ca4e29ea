#include "machine.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "device.h"
#include "memory.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace tk::emulator {

namespace {

// Rounds in which every thread that can run only looks whether memory has changed.
constexpr int kPatience = 10000;

enum Order { kAscending, kDescending, kRandom, kOrders };

uint32_t lane_bit(int thread) { return 1u << thread % kWarp; }

}  // namespace

Machine& machine() {
  static Machine* const only = new Machine;
  return *only;
}

Options& options() {
  static Options only;
  return only;
}

std::string describe(Site site) {
  const char* slash = strrchr(site.file, '/');
  return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

uint64_t Machine::random() {
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return random_state_;
}

void Machine::run(const Launch& launch) {
  if (launch.threads == 0 || launch.threads > kMaxThreads || launch.threads % kWarp) {
    throw Error(std::string(launch.name) + ": " + std::to_string(launch.threads) +
                " threads; must be a multiple of 32, at most 1024");
  }
  launch_ = launch;
  error_.clear();
  stacks_.reserve(static_cast<int>(launch.threads));
  const uint64_t seed = options().seed;
  random_state_ = (seed + 1) * 0x9E3779B97F4A7C15u;
  order_ = static_cast<int>(seed % kOrders);
  warp_count_ = static_cast<int>(launch.threads) / kWarp;
  gridDim = dim3(launch.grid[0], launch.grid[1], launch.grid[2]);
  blockDim = dim3(launch.threads);
  blockIdx = dim3(0, 0, 0);
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) run_block();
    }
  }
}

void Machine::run_block() {
  begin_shared(launch_.shared_bytes, static_cast<int>(random() % 8));
  alive_ = static_cast<int>(launch_.threads);
  idle_rounds_ = 0;
  for (Barrier& barrier : barriers_) barrier = {};
  for (int w = 0; w < warp_count_; ++w) {
    warps_[w].ready = kEveryLane;
    warps_[w].spinning = warps_[w].done = 0;
    warps_[w].meetings = 0;
  }
  draw_priorities();
  for (int t = 0; t < alive_; ++t) {
    Thread& thread = threads_[t];
    thread.stack_pointer = stacks_.prepare(t, fiber_entry);
    thread.state = State::kReady;
    thread.copies.clear();
    thread.committed.clear();
  }
  current_ = 0;
  const int first = pick();
  current_ = first;
  threadIdx = dim3(static_cast<unsigned>(first), 0, 0);
  tk_emulator_switch(&main_stack_pointer_, threads_[first].stack_pointer);
  current_ = -1;
  if (!error_.empty()) throw Error(error_);
  check_shared_edges();
}

void Machine::fiber_entry() {
  Machine& self = machine();
  self.launch_.thread(self.launch_.arguments);
  self.finish_thread();
}

void Machine::finish_thread() {
  Warp& warp = warps_[current_ / kWarp];
  const uint32_t bit = lane_bit(current_);
  current().state = State::kDone;
  warp.ready &= ~bit;
  warp.done |= bit;
  --alive_;
  idle_rounds_ = 0;
  go_on_with_another();
  __builtin_unreachable();
}

void Machine::draw_priorities() {
  for (int w = 0; w < warp_count_; ++w) warps_[w].priority = static_cast<uint32_t>(random());
}

int Machine::pick_lane(int w) {
  const uint32_t ready = warps_[w].ready;
  if (order_ == kDescending) return w * kWarp + 31 - __builtin_clz(ready);
  const int first = order_ == kRandom ? static_cast<int>(random() % kWarp) : 0;
  const uint32_t rotated = ready >> first | (first ? ready << (kWarp - first) : 0);
  return w * kWarp + (__builtin_ctz(rotated) + first) % kWarp;
}

int Machine::pick_warp() {
  int best = -1;
  for (int w = 0; w < warp_count_; ++w) {
    if (!warps_[w].ready) continue;
    if (best < 0 || order_ == kDescending ||
        (order_ == kRandom && warps_[w].priority > warps_[best].priority)) {
      best = w;
    }
  }
  return best;
}

int Machine::pick() {
  int w = current_ / kWarp;
  if (!warps_[w].ready) {
    w = pick_warp();
    if (w < 0) {
      for (int other = 0; other < warp_count_; ++other) {
        warps_[other].ready = warps_[other].spinning;
        warps_[other].spinning = 0;
      }
      if (++idle_rounds_ > kPatience) return -1;
      draw_priorities();
      w = pick_warp();
      if (w < 0) return -1;
    }
  }
  return pick_lane(w);
}

void Machine::switch_to(int next) {
  void** const from = &threads_[current_].stack_pointer;
  current_ = next;
  threadIdx.x = static_cast<unsigned>(next);
  tk_emulator_switch(from, threads_[next].stack_pointer);
}

void Machine::go_on_with_another() {
  const int next = pick();
  if (next >= 0) {
    if (next != current_) switch_to(next);
    return;
  }
  if (alive_) error_ = deadlock();
  tk_emulator_switch(&current().stack_pointer, main_stack_pointer_);
}

void Machine::fail(std::string message) {
  char place[160];
  snprintf(place, sizeof place, "%s, block (%u, %u, %u), thread %d: ", launch_.name, blockIdx.x,
           blockIdx.y, blockIdx.z, current_);
  error_ = place + message;
  tk_emulator_switch(&current().stack_pointer, main_stack_pointer_);
  __builtin_unreachable();
}

void Machine::together(const Collective& what, uint32_t lanes, void* operand, Site site) {
  Warp& warp = warps_[current_ / kWarp];
  const uint32_t bit = lane_bit(current_);
  int m = 0;
  while (m < warp.meetings && !(warp.meeting[m].lanes & lanes)) ++m;
  if (m == warp.meetings) {
    if (!(lanes & bit)) fail(describe(site) + ": " + what.name + " for lanes without its own");
    warp.meeting[warp.meetings++] = {&what, lanes, 0, site};
  }
  Meeting& meeting = warp.meeting[m];
  if (meeting.what != &what || meeting.lanes != lanes ||
      (what.same_site && meeting.site.line != site.line)) {
    char text[400];
    snprintf(text, sizeof text,
             "%s for lanes %08x at %s, but lanes %08x of the warp wait in %s for lanes %08x at %s",
             what.name, lanes, describe(site).c_str(), meeting.arrived, meeting.what->name,
             meeting.lanes, describe(meeting.site).c_str());
    fail(text);
  }
  warp.operand[current_ % kWarp] = operand;
  meeting.arrived |= bit;
  if (meeting.arrived != lanes) {
    Thread& self = current();
    self.state = State::kTogether, self.doing = what.name, self.site = site;
    warp.ready &= ~bit;
    go_on_with_another();
    return;
  }
  what.run(lanes, warp.operand);
  idle_rounds_ = 0;
  warp.meeting[m] = warp.meeting[--warp.meetings];
  warp.ready |= lanes;
  if (order_ == kRandom && random() % 32 == 0) {
    draw_priorities();
    const int w = pick_warp();
    if (w != current_ / kWarp) switch_to(pick_lane(w));
  }
}

void Machine::barrier(int id, unsigned threads, bool wait, const char* name, Site site) {
  Barrier& barrier = barriers_[id];
  if (barrier.arrived && barrier.expected != threads) {
    fail(describe(site) + ": " + name + " for " + std::to_string(threads) + " threads, but at " +
         describe(barrier.site) + " for " + std::to_string(barrier.expected));
  }
  barrier = {threads, barrier.arrived + 1, name, site};
  if (barrier.arrived == threads) {
    barrier.arrived = 0;
    wake_barrier(id);
    idle_rounds_ = 0;
    if (!wait) return;
    draw_priorities();
    current().state = State::kReady;
    const int w = pick_warp();
    if (w != current_ / kWarp) switch_to(pick_lane(w));
    return;
  }
  if (!wait) return;
  Thread& self = current();
  self.state = State::kBarrier, self.barrier = static_cast<uint8_t>(id);
  self.doing = name, self.site = site;
  warps_[current_ / kWarp].ready &= ~lane_bit(current_);
  go_on_with_another();
}

void Machine::wake_barrier(int id) {
  for (int t = 0; t < warp_count_ * kWarp; ++t) {
    if (threads_[t].state != State::kBarrier || threads_[t].barrier != id) continue;
    threads_[t].state = State::kReady;
    warps_[t / kWarp].ready |= lane_bit(t);
  }
}

void Machine::spin(const char* name, Site site) {
  Warp& warp = warps_[current_ / kWarp];
  Thread& self = current();
  self.doing = name, self.site = site;
  warp.ready &= ~lane_bit(current_);
  warp.spinning |= lane_bit(current_);
  go_on_with_another();
}

std::string Machine::deadlock() {
  std::string text = std::string(launch_.name) + ": deadlock in block (" +
                     std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
                     std::to_string(blockIdx.z) + ")";
  return text;
}

void together(const Collective& what, uint32_t lanes, void* operand, Site site) {
  machine().together(what, lanes, operand, site);
}

int this_lane() { return machine().current_index() % kWarp; }

void fail(Site site, const char* format, ...) {
  char text[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  machine().fail(describe(site) + ": " + text);
}

void barrier(int id, unsigned threads, const char* name, Site site) {
  machine().barrier(id, threads, true, name, site);
}

void spin(const char* name, Site site) { machine().spin(name, site); }

void launch(const Launch& what) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  machine().run(what);
}

}  // namespace tk::emulator
