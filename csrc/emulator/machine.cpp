#include "emulator/machine.h"

#include <cstdarg>
#include <cstdio>
#include <mutex>

#include "emulator/fault.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace tk::emulator {

Machine machine;
Thread* current = nullptr;

namespace {

// Rounds of polling, without any atomic or asynchronous copy, after which the launch is deadlocked.
constexpr int kMaxIdleRounds = 20000;
// Rounds of polling after which another block starts, because the others may wait for it.
constexpr int kIdleRoundsBeforeNewBlock = 4;
constexpr unsigned kMaxResidents = 32;

}  // namespace

Settings& settings() {
  static Settings only;
  return only;
}

uint64_t Machine::random() {
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return random_state_ >> 8;
}

void Machine::run(const Launch& launch) {
  launch_ = launch;
  const auto refuse = [&](const std::string& why) {
    throw Error(std::string(launch.name) + ": " + why);
  };
  if (launch.threads == 0 || launch.threads > kMaxThreads || launch.threads % kWarp) {
    refuse(std::to_string(launch.threads) + " threads; expected a multiple of 32 from 32 to 1024");
  }
  if (launch.shared_bytes > settings().max_shared_bytes) {
    refuse(std::to_string(launch.shared_bytes) + " bytes of shared memory; at most " +
           std::to_string(settings().max_shared_bytes));
  }
  gridDim = dim3(launch.grid[0], launch.grid[1], launch.grid[2]);
  blockDim = dim3(launch.threads);
  const uint64_t blocks = uint64_t{gridDim.x} * gridDim.y * gridDim.z;
  if (blocks == 0 || gridDim.x > 0x7fffffff || gridDim.y > 65535 || gridDim.z > 65535) {
    refuse("invalid grid of " + std::to_string(gridDim.x) + " x " + std::to_string(gridDim.y) +
           " x " + std::to_string(gridDim.z) + " blocks");
  }
  const uint64_t seed = settings().seed;
  random_state_ = (seed + 1) * 0x9E3779B97F4A7C15u;
  order_ = seed < 2 ? static_cast<Order>(seed) : Order::kRandom;
  arrival_ = seed < 2 ? static_cast<Arrival>(seed) : seed % 2 ? Arrival::kLate : Arrival::kRandom;
  residents_ = 1 + seed % 3;
  started_ = 0, blocks_ = static_cast<unsigned>(blocks);
  idle_rounds_ = 0, switch_block_ = false;
  error_.clear();
  error_code_ = nullptr;
  races.begin_launch(settings().races);
  const FaultHandler handler;
  while (error_.empty()) {
    for (size_t slot = resident_.size(); slot-- > 0;) {
      if (resident_[slot]->alive == 0) retire(slot);
    }
    while (resident_.size() < residents_ && started_ < blocks_) start_block();
    if (resident_.empty() || !error_.empty()) break;
    Thread* next = pick_thread();
    if (!next) {
      error_ = describe_deadlock();
      break;
    }
    current = next;
    blockIdx = next->block->index;
    threadIdx = dim3(static_cast<unsigned>(next->index), 0, 0);
    tk_emulator_switch(&main_stack_pointer_, next->stack_pointer);
    current = nullptr;
  }
  for (auto& block : resident_) spare_.push_back(std::move(block));
  resident_.clear();
  if (error_code_) error_ += " (" + describe_code(error_code_) + ")";
  if (!error_.empty()) throw Error(error_);
}

void Machine::start_block() {
  if (spare_.empty()) spare_.push_back(std::make_unique<Block>());
  std::unique_ptr<Block> owned = std::move(spare_.back());
  spare_.pop_back();
  Block& block = *owned;
  block.number = started_++;
  block.index = dim3(block.number % gridDim.x, block.number / gridDim.x % gridDim.y,
                     block.number / gridDim.x / gridDim.y);
  block.thread_count = block.alive = static_cast<int>(launch_.threads);
  block.warp_count = block.thread_count / kWarp;
  block.stacks.reserve(block.thread_count);
  block.shared.begin(launch_.shared_bytes, random() % 8);
  if (!block.threads) block.threads = std::make_unique<Thread[]>(kMaxThreads);
  for (Barrier& barrier : block.barriers) barrier = {};
  for (auto& arrivals : block.arrivals) arrivals.clear();
  for (int w = 0; w < block.warp_count; ++w) {
    Warp& warp = block.warps[w];
    warp.ready = kAllLanes;
    warp.spinning = warp.done = 0;
    warp.pending_count = warp.rotation = 0;
    warp.priority = static_cast<uint32_t>(random());
  }
  for (int t = 0; t < block.thread_count; ++t) {
    Thread& thread = block.threads[t];
    thread.block = &block;
    thread.warp = &block.warps[t / kWarp];
    thread.index = t;
    thread.bit = 1u << t % kWarp;
    thread.state = State::kReady;
    thread.stack_pointer = block.stacks.prepare(t, thread_entry);
    thread.copies = {};
  }
  block.sm90.used = false;
  if (races.on) races.begin_block(block);
  resident_.push_back(std::move(owned));
}

void Machine::retire(size_t slot) {
  Block& block = *resident_[slot];
  std::string wrong = finish(block);
  if (block.shared.written_outside()) {
    wrong =
        "wrote outside of its " + std::to_string(block.shared.size()) + " bytes of shared memory";
  }
  if (error_.empty() && !wrong.empty()) error_ = describe(block) + ": " + wrong;
  spare_.push_back(std::move(resident_[slot]));
  resident_.erase(resident_.begin() + static_cast<long>(slot));
}

void Machine::thread_entry() {
  machine.launch_.thread(machine.launch_.arguments);
  Thread& self = *current;
  Warp& warp = *self.warp;
  for (int m = 0; m < warp.pending_count; ++m) {
    const PendingCollective& pending = warp.pending[m];
    if (!(pending.lanes & self.bit)) continue;
    char lanes[60];
    snprintf(lanes, sizeof lanes, " by lanes %08x for lanes %08x", pending.arrived, pending.lanes);
    machine.abort_launch("exits, but is waited for in " + std::string(pending.collective->name) +
                         " at " + describe(pending.site) + lanes);
  }
  self.state = State::kDone;
  warp.ready &= ~self.bit;
  warp.done |= self.bit;
  --self.block->alive;
  machine.note_progress();
  machine.yield();
  __builtin_unreachable();
}

Thread* Machine::pick_lane(Block& block, int w) {
  Warp& warp = block.warps[w];
  int lane;
  if (order_ == Order::kAscending) {
    lane = __builtin_ctz(warp.ready);
  } else if (order_ == Order::kDescending) {
    lane = 31 - __builtin_clz(warp.ready);
  } else {
    const int first = warp.rotation;
    const uint32_t rotated = warp.ready >> first | warp.ready << (-first & 31);
    lane = (__builtin_ctz(rotated) + first) & 31;
  }
  return &block.threads[w * kWarp + lane];
}

Thread* Machine::pick_thread_in(Block& block) {
  int best = -1;
  for (int w = 0; w < block.warp_count; ++w) {
    const Warp& warp = block.warps[w];
    if (!warp.ready) continue;
    if (best < 0 || order_ == Order::kDescending ||
        (order_ == Order::kRandom && warp.priority > block.warps[best].priority)) {
      best = w;
    }
  }
  return best < 0 ? nullptr : pick_lane(block, best);
}

bool Machine::wake_spinning() {
  bool any = false;
  for (auto& block : resident_) {
    for (int w = 0; w < block->warp_count; ++w) {
      Warp& warp = block->warps[w];
      any |= warp.spinning != 0;
      warp.ready |= warp.spinning;
      warp.spinning = 0;
      warp.priority = static_cast<uint32_t>(random());
    }
  }
  return any;
}

bool Machine::deliver_any_load() {
  for (auto& block : resident_) {
    if (deliver_load(*block)) return true;
  }
  return false;
}

bool Machine::should_deliver() {
  return arrival_ == Arrival::kSoon || (arrival_ == Arrival::kRandom && random() % 16 == 0);
}

Thread* Machine::pick_thread() {
  for (;;) {
    const size_t count = resident_.size();
    const size_t first = switch_block_ && order_ == Order::kRandom ? random() % count : 0;
    switch_block_ = false;
    for (size_t n = 0; n < count; ++n) {
      if (Thread* next = pick_thread_in(*resident_[(first + n) % count])) return next;
    }
    const bool delivered = deliver_any_load(), woken = wake_spinning();
    if (delivered) continue;
    if (!woken || ++idle_rounds_ > kMaxIdleRounds) return nullptr;
    if (idle_rounds_ > kIdleRoundsBeforeNewBlock && started_ < blocks_ && count < kMaxResidents) {
      start_block();
      idle_rounds_ = 0;
    }
  }
}

void Machine::yield() {
  ++switches_;
  Thread& self = *current;
  Block& block = *self.block;
  const int w = static_cast<int>(self.warp - block.warps);
  if (!block.sm90.loads.empty() && should_deliver()) deliver_load(block);
  Thread* next = nullptr;
  if (!switch_block_) next = self.warp->ready ? pick_lane(block, w) : pick_thread_in(block);
  if (!next) {
    tk_emulator_switch(&self.stack_pointer, main_stack_pointer_);
    return;
  }
  if (next == &self) return;
  current = next;
  threadIdx.x = static_cast<unsigned>(next->index);
  tk_emulator_switch(&self.stack_pointer, next->stack_pointer);
}

void Machine::maybe_yield() {
  if (order_ != Order::kRandom || random() % 8) return;
  for (int w = 0; w < current->block->warp_count; ++w) {
    current->block->warps[w].priority = static_cast<uint32_t>(random());
  }
  switch_block_ = true;
  yield();
}

void Machine::abort_launch(std::string error) {
  error_ = describe(*current->block) + ", thread " + std::to_string(current->index) + ": " +
           std::move(error);
  tk_emulator_switch(&current->stack_pointer, main_stack_pointer_);
  __builtin_unreachable();
}

void Machine::abort_launch(const void* code, std::string error) {
  error_code_ = code;
  abort_launch(std::move(error));
}

std::string Machine::describe_deadlock() {
  std::string text;
  for (const auto& block : resident_) {
    if (!text.empty()) text += '\n';
    text +=
        describe(*block) + ": deadlock, no thread can make progress\n" + describe_threads(*block);
  }
  return text;
}

static const char* latest = "";

void launch(const Launch& launch) {
  static std::mutex launch_mutex;
  const std::lock_guard<std::mutex> lock(launch_mutex);
  latest = launch.name;
  if (settings().runs_kernels) machine.run(launch);
}

const char* latest_launch() { return latest; }

}  // namespace tk::emulator
