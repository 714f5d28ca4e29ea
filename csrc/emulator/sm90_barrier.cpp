// mbarrier, fence.proxy.async, setmaxnreg and elect.
#include <cstdio>
#include <cstring>

#include "cuda/platform/sm90_ptx.h"
#include "emulator/machine.h"

namespace tk::emulator {

namespace {

// Value stored in the memory of an mbarrier, to detect stores that overwrite it.
uint64_t cookie(uint32_t address) { return 0x6d62617272696572u ^ address; }

constexpr int64_t kMaxTransactionBytes = (1 << 20) - 1;  // of one phase

MBarrier& find_mbarrier(const uint64_t* barrier, const char* name, Site site) {
  check_shared(barrier, 8, 8, name, site);
  const uint32_t address = shared_address(barrier);
  auto& barriers = sm90().barriers;
  const auto found = barriers.find(address);
  const auto offset = reinterpret_cast<const unsigned char*>(barrier) - shared_memory();
  if (found == barriers.end()) fail(site, "%s: no mbarrier at byte %td", name, offset);
  const uint64_t stored = cookie(address);
  if (memcmp(barrier, &stored, sizeof stored) != 0) {
    fail(site, "%s: the mbarrier at byte %td was overwritten", name, offset);
  }
  if (races.on) races.access(barrier, 8, Access::kAtomic, {site});
  return found->second;
}

void end_phase_if_complete(Block& block, uint32_t address, MBarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.expected;
  ++barrier.phase;
  barrier.unobserved |= barrier.copies;
  barrier.copies = false;
  if (races.on) {
    races.merge(barrier.ended, barrier.arriving);
    barrier.arriving = nullptr;
  }
  for (int t = 0; t < block.thread_count; ++t) {
    Thread& thread = block.threads[t];
    if (thread.state != State::kMBarrier || thread.mbarrier != address) continue;
    thread.state = State::kReady;
    thread.warp->ready |= thread.bit;
    barrier.unobserved = false;
  }
}

void arrive(uint64_t* at, uint32_t bytes, const char* name, Site site) {
  machine.maybe_yield();
  MBarrier& barrier = find_mbarrier(at, name, site);
  if (barrier.pending == 0) fail(site, "%s: more than %u arrivals", name, barrier.expected);
  barrier.bytes += bytes;
  if (barrier.bytes > kMaxTransactionBytes)
    fail(site, "%s: %u bytes exceed the transaction count of a phase", name, bytes);
  --barrier.pending;
  if (races.on) races.publish(barrier.arriving);
  end_phase_if_complete(*current->block, shared_address(at), barrier);
  machine.note_progress();
}

// Registers of a multiprocessor for each lane index.
constexpr int kRegisters = 64 * 1024 / kWarp;

struct Registers {
  int count;
  bool increase;
  bool done;
  Site site;
};

bool enough_registers(int count) {
  const std::vector<int>& registers = sm90().registers;
  int sum = count - registers[static_cast<size_t>(current->index / kWarp)];
  for (const int each : registers) sum += each;
  return sum <= kRegisters;
}

void run_registers(uint32_t, void* const* operands) {
  const auto& wanted = *static_cast<Registers*>(operands[0]);
  int& mine = sm90().registers[static_cast<size_t>(current->index / kWarp)];
  if (wanted.increase ? wanted.count < mine : wanted.count > mine) {
    fail(wanted.site, "setmaxnreg.%s to %d: the warp has %d", wanted.increase ? "inc" : "dec",
         wanted.count, mine);
  }
  const bool done = enough_registers(wanted.count);
  if (done) mine = wanted.count;
  for (int lane = 0; lane < kWarp; ++lane) static_cast<Registers*>(operands[lane])->done = done;
}

// The same lane every time (PTX ISA, elect.sync); which one depends on the schedule.
void run_elect(uint32_t, void* const* operands) {
  const uint64_t elected = machine.order() == Order::kRandom ? settings().seed % kWarp : 0;
  *static_cast<bool*>(operands[elected]) = true;
}

const Collective kSetRegisters{"setmaxnreg", run_registers, true};
const Collective kElect{"elect", run_elect, true};

}  // namespace

Sm90& sm90() {
  Block& block = *current->block;
  Sm90& state = block.sm90;
  if (state.used) return state;
  const auto warps = static_cast<size_t>(block.warp_count);
  state = {};
  state.used = true;
  state.async.assign(block.shared.size(), kPoison);
  state.stores.resize(static_cast<size_t>(block.thread_count));
  state.products.resize(warps);
  state.issues.resize((warps + 3) / 4);
  // Registers of each thread at launch: the most that the block size allows, a multiple of 8.
  const int registers = 64 * 1024 / block.thread_count / 8 * 8;
  state.registers.assign(warps, registers > 248 ? 255 : registers);
  return state;
}

unsigned char* async_view(Block& block, const void* address) {
  return block.sm90.async.data() +
         (static_cast<const unsigned char*>(address) - block.shared.base());
}

uint64_t hash_chunk(uint64_t hash, Block& block, const void* address) {
  uint64_t words[4];
  memcpy(words, address, 16);
  memcpy(words + 2, async_view(block, address), 16);
  for (const uint64_t word : words) hash = (hash ^ word) * 0x9E3779B97F4A7C15u ^ hash >> 29;
  return hash;
}

void complete_bytes(Block& block, uint32_t address, size_t bytes, Step step) {
  MBarrier& barrier = block.sm90.barriers.at(address);
  barrier.bytes -= static_cast<int64_t>(bytes);
  barrier.copies = true;
  if (races.on) races.end_async(block, step, barrier.arriving);
  end_phase_if_complete(block, address, barrier);
  machine.note_progress();
}

uint32_t barrier_for_copy(const uint64_t* at, const char* name, Site site) {
  if (!find_mbarrier(at, name, site).fenced) {
    fail(site, "%s: no fence since the mbarrier at byte %td was initialised", name,
         reinterpret_cast<const unsigned char*>(at) - shared_memory());
  }
  return shared_address(at);
}

std::string describe_mbarrier(const Block& block, uint32_t address) {
  const MBarrier& barrier = block.sm90.barriers.at(address);
  char text[160];
  snprintf(text, sizeof text,
           "the mbarrier at byte %td, phase %u: %u of %u arrivals and %lld bytes",
           block.shared.at(address) - block.shared.base(), barrier.phase, barrier.pending,
           barrier.expected, static_cast<long long>(barrier.bytes));
  return std::string(text) + " are missing";
}

std::string finish(Block& block) {
  const Sm90& state = block.sm90;
  if (!state.used) return "";
  if (!state.loads.empty()) {
    return "exits before the copy at " + describe(state.loads[0].transfer.site) + " has arrived";
  }
  for (const auto& [address, barrier] : state.barriers) {
    if (barrier.unobserved) {
      return "exits without waiting for the copies that completed on " +
             describe_mbarrier(block, address);
    }
  }
  for (const StoreQueue& queue : state.stores) {
    for (const Store& store : queue.stores) {
      if (store.data.empty()) {
        return "exits before the store at " + describe(store.transfer.site) +
               " has read shared memory";
      }
    }
  }
  for (const WarpProducts& warp : state.products) {
    if (!warp.products.empty()) {
      return "exits before the wgmma at " + describe(warp.products[0].site) + " is waited for";
    }
  }
  for (size_t w = 1; w < state.registers.size(); ++w) {
    if (w % 4 && state.registers[w] != state.registers[w - 1]) {
      return "setmaxnreg by only part of the warpgroup of warp " + std::to_string(w);
    }
  }
  finish_stores(block);
  return "";
}

}  // namespace tk::emulator

namespace tk::cuda {

using namespace emulator;

void mbarrier_init(uint64_t* at, uint32_t arrivals, Site site) {
  check_shared(at, 8, 8, "mbarrier.init", site);
  const uint32_t address = shared_address(at);
  if (arrivals == 0 || arrivals > kMaxTransactionBytes) {
    fail(site, "mbarrier.init: %u arrivals; expected 1 to 1048575", arrivals);
  }
  if (races.on) races.access(at, 8, Access::kWrite, {site});
  MBarrier barrier{};
  barrier.expected = barrier.pending = arrivals;
  barrier.owner = current->index;
  if (!sm90().barriers.emplace(address, barrier).second) {
    fail(site, "mbarrier.init: the mbarrier is already initialised");
  }
  const uint64_t stored = cookie(address);
  memcpy(at, &stored, sizeof stored);
}

void fence_mbarrier_init() {
  for (auto& [address, barrier] : sm90().barriers) {
    barrier.fenced |= barrier.owner == current->index;
  }
}

void mbarrier_arrive(uint64_t* at, Site site) { arrive(at, 0, "mbarrier.arrive", site); }

void mbarrier_arrive_expect(uint64_t* at, uint32_t bytes, Site site) {
  arrive(at, bytes, "mbarrier.arrive.expect_tx", site);
}

bool mbarrier_try_wait(uint64_t* at, uint32_t parity, Site site) {
  find_mbarrier(at, "mbarrier.try_wait", site);
  set_waiting(State::kSpin, "mbarrier.try_wait", site);
  current->mbarrier = shared_address(at);
  current->warp->spinning |= current->bit;
  machine.yield();
  current->state = State::kReady;
  MBarrier& barrier = find_mbarrier(at, "mbarrier.try_wait", site);
  if ((barrier.phase & 1) == (parity & 1)) return false;
  barrier.unobserved = false;
  if (races.on) races.observe(barrier.ended);
  return true;
}

void mbarrier_wait(uint64_t* at, uint32_t parity, Site site) {
  machine.maybe_yield();
  MBarrier& barrier = find_mbarrier(at, "mbarrier.try_wait", site);
  if ((barrier.phase & 1) != (parity & 1)) {
    barrier.unobserved = false;
  } else {
    set_waiting(State::kMBarrier, "mbarrier.try_wait", site);
    current->mbarrier = shared_address(at);
    machine.yield();
  }
  if (races.on) races.observe(barrier.ended);
}

// Refreshes the async-proxy copy with all stores that this thread may observe, including those of
// other threads that are ordered before it.
void fence_async() {
  Sm90& state = sm90();
  const SharedMemory& shared = current->block->shared;
  memcpy(state.async.data(), shared.base(), shared.size());
  fence_mbarrier_init();
  if (races.on) races.fence_async();
}

bool elect_one(Site site) {
  bool elected = false;
  emulator::warp_collective(kElect, kAllLanes, &elected, site);
  return elected;
}

void set_registers(int count, bool increase, Site site) {
  Registers registers{count, increase, false, site};
  while (!registers.done) {
    while (increase && !enough_registers(count)) emulator::spin("setmaxnreg.inc", site);
    emulator::warp_collective(kSetRegisters, kAllLanes, &registers, site);
  }
}

}  // namespace tk::cuda
