// Waiting of threads: warp collectives, barriers of the block, and polling of memory.
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <tuple>

#include "emulator/machine.h"

namespace tk::emulator {

namespace {

std::string hex(uint32_t lanes) {
  char text[9];
  snprintf(text, sizeof text, "%08x", lanes);
  return text;
}

[[noreturn]] void fail_divergent(const Collective& collective, uint32_t lanes, Site site,
                                 const PendingCollective& pending) {
  fail(site, "%s for lanes %08x, but lanes %08x of the warp wait in %s for lanes %08x at %s",
       collective.name, lanes, pending.arrived, pending.collective->name, pending.lanes,
       describe(pending.site).c_str());
}

bool equal_sites(Site a, Site b) {
  return a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file));
}

}  // namespace

std::string describe(Site site) {
  const char* slash = strrchr(site.file, '/');
  return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

std::string describe(const Block& block) {
  return std::string(machine.launched().name) + ", block (" + std::to_string(block.index.x) + ", " +
         std::to_string(block.index.y) + ", " + std::to_string(block.index.z) + ")";
}

std::string describe_threads(const Block& block) {
  std::map<std::tuple<State, std::string, uint32_t>, std::map<int, uint32_t>> groups;
  for (int t = 0; t < block.thread_count; ++t) {
    const Thread& thread = block.threads[t];
    const Warp& warp = *thread.warp;
    std::string where;
    uint32_t lanes = 0;
    if (thread.state != State::kDone)
      where = std::string(thread.operation) + " at " + describe(thread.site);
    if (thread.state == State::kBarrier) {
      const Barrier& barrier = block.barriers[thread.barrier];
      where += ", where " + std::to_string(barrier.arrived) + " of " +
               std::to_string(barrier.expected) + " threads have arrived";
    }
    if (thread.state != State::kDone && thread.mbarrier != kNoMBarrier) {
      where += ", " + describe_mbarrier(block, thread.mbarrier);
    }
    for (int m = 0; m < warp.pending_count && thread.state == State::kCollective; ++m) {
      if (warp.pending[m].arrived & thread.bit) lanes = warp.pending[m].lanes;
    }
    if (lanes) where += " for lanes " + hex(lanes);
    groups[{thread.state, where, lanes}][t / kWarp] |= thread.bit;
  }
  std::string text;
  for (const auto& [key, warps] : groups) {
    if (!text.empty()) text += '\n';
    text += "  warp ";
    for (const auto& [w, lanes] : warps) {
      if (w != warps.begin()->first) text += ", ";
      text += std::to_string(w);
      if (lanes != kAllLanes) text += " lanes " + hex(lanes);
    }
    text += std::get<0>(key) == State::kDone ? " exited" : " in " + std::get<1>(key);
  }
  return text;
}

void fail(Site site, const char* format, ...) {
  char text[500];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  machine.abort_launch(describe(site) + ": " + text);
}

void set_waiting(State state, const char* operation, Site site) {
  current->state = state;
  current->operation = operation;
  current->site = site;
  current->mbarrier = kNoMBarrier;
  current->warp->ready &= ~current->bit;
}

int this_lane() { return current->index % kWarp; }

void warp_collective(const Collective& collective, uint32_t lanes, void* operand, Site site) {
  Thread& self = *current;
  Warp& warp = *self.warp;
  int m = 0;
  for (; m < warp.pending_count; ++m) {
    const PendingCollective& other = warp.pending[m];
    if (other.collective == &collective && other.lanes == lanes &&
        (!collective.same_site || equal_sites(other.site, site))) {
      break;
    }
    if (other.arrived & lanes && other.lanes & self.bit)
      fail_divergent(collective, lanes, site, other);
  }
  PendingCollective& pending = warp.pending[m];
  if (m == warp.pending_count) {
    if (!(lanes & self.bit))
      fail(site, "%s for lanes %08x, which do not include its own", collective.name, lanes);
    if (lanes & warp.done) {
      fail(site, "%s for lanes %08x, of which %08x have exited", collective.name, lanes,
           lanes & warp.done);
    }
    pending = {&collective, lanes, 0, site};
    ++warp.pending_count;
  }
  warp.operand[self.index % kWarp] = operand;
  pending.arrived |= self.bit;
  if (pending.arrived != lanes) {
    set_waiting(State::kCollective, collective.name, site);
    machine.yield();
    return;
  }
  collective.run(lanes, warp.operand);
  warp.pending[m] = warp.pending[--warp.pending_count];
  warp.ready |= lanes;
  if (machine.order() == Order::kRandom) {
    warp.rotation = static_cast<int>(machine.random() % kWarp);
    machine.maybe_yield();
  }
}

void wake_barrier(Block& block, int id) {
  std::vector<int> waiting;
  for (int t = 0; t < block.thread_count; ++t) {
    Thread& thread = block.threads[t];
    if (thread.state != State::kBarrier || thread.barrier != id) continue;
    thread.state = State::kReady;
    thread.warp->ready |= thread.bit;
    if (races.on) waiting.push_back(t);
  }
  if (races.on) races.synchronize(block, block.arrivals[id], waiting);
  block.arrivals[id].clear();
  for (int w = 0; w < block.warp_count; ++w) {
    block.warps[w].priority = static_cast<uint32_t>(machine.random());
  }
}

namespace {

void arrive_at_barrier(int id, unsigned threads, bool wait, const char* name, Site site) {
  Block& block = *current->block;
  if (id < 0 || id >= kBarriers) fail(site, "%s: barrier %d; expected 0 to 15", name, id);
  if (threads == 0 || threads % kWarp || threads > static_cast<unsigned>(block.thread_count)) {
    fail(site, "%s for %u threads of %d; must be a multiple of 32, and at most the block", name,
         threads, block.thread_count);
  }
  Barrier& barrier = block.barriers[id];
  if (barrier.arrived && barrier.expected != threads) {
    fail(site, "%s: barrier %d for %u threads, but at %s for %u threads", name, id, threads,
         describe(barrier.site).c_str(), barrier.expected);
  }
  barrier = {threads, barrier.arrived + 1, name, site};
  if (races.on) block.arrivals[id].push_back(current->index);
  if (wait) {
    set_waiting(State::kBarrier, name, site);
    current->barrier = static_cast<uint8_t>(id);
  }
  if (barrier.arrived == threads) {
    barrier.arrived = 0;
    wake_barrier(block, id);
  }
  if (wait) machine.yield();
}

}  // namespace

void barrier_wait(int id, unsigned threads, const char* name, Site site) {
  arrive_at_barrier(id, threads, true, name, site);
}

void barrier_arrive(int id, unsigned threads, const char* name, Site site) {
  arrive_at_barrier(id, threads, false, name, site);
}

void fence() {
  if (races.on) races.fence();
}

int load_acquire(const int* global, Site site) {
  spin("load_acquire", site);
  if (races.on) {
    races.access(global, sizeof *global, Access::kAtomic, {site});
    races.acquire(global);
  }
  return *global;
}

void add_release(int* global, int value, Site site) {
  machine.maybe_yield();
  if (races.on) {
    races.access(global, sizeof *global, Access::kAtomic, {site});
    races.release(global);
  }
  *global += value;
  machine.note_progress();
}

void spin(const char* name, Site site) {
  set_waiting(State::kSpin, name, site);
  current->warp->spinning |= current->bit;
  machine.yield();
  current->state = State::kReady;
}

}  // namespace tk::emulator
