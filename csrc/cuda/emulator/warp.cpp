// Shuffles, votes and atomics.
#include <type_traits>

#include "cuda/emulator/machine.h"

namespace tk::emulator {

namespace {

template <typename Do>
void each_lane(uint32_t lanes, Do&& run) {
  for (; lanes; lanes &= lanes - 1) run(__builtin_ctz(lanes));
}

void run_shuffle(uint32_t lanes, void* const* operands) {
  uint64_t value[kWarp];
  each_lane(lanes, [&](int lane) { value[lane] = static_cast<Exchange*>(operands[lane])->value; });
  each_lane(lanes, [&](int lane) {
    Exchange& mine = *static_cast<Exchange*>(operands[lane]);
    if (!(lanes >> (mine.source & 31) & 1)) {
      fail(mine.site, "shuffle: lane %d reads lane %d, which takes no part", lane, mine.source);
    }
    mine.value = value[mine.source & 31];
  });
}

void run_ballot(uint32_t lanes, void* const* operands) {
  uint32_t votes = 0;
  each_lane(lanes, [&](int lane) {
    votes |= static_cast<uint32_t>(static_cast<Exchange*>(operands[lane])->value) << lane;
  });
  each_lane(lanes, [&](int lane) { static_cast<Exchange*>(operands[lane])->value = votes; });
}

void run_sync(uint32_t lanes, void* const*) {
  if (races.on) races.meet_lanes(lanes);
}

template <typename T>
T change_at(T* address, T (*change)(T, T), T value, Site site) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T)) {
    fail(site, "atomic: address %p; must be a multiple of %zu", static_cast<void*>(address),
         sizeof(T));
  }
  machine.perhaps_yield();
  if (races.on && std::is_floating_point_v<T>) {
    races.access(address, sizeof(T), races.sum(), {site});
  } else if (races.on) {
    races.relaxed(address, sizeof(T), {site});
  }
  const T old = *address;
  *address = change(old, value);
  machine.progress();
  return old;
}

}  // namespace

const Collective kShuffle{"shuffle", run_shuffle, true};
const Collective kBallot{"vote", run_ballot, true};
const Collective kSyncWarp{"__syncwarp", run_sync, false};

float update(float* address, float (*change)(float, float), float value, Site site) {
  return change_at(address, change, value, site);
}

int update(int* address, int (*change)(int, int), int value, Site site) {
  return change_at(address, change, value, site);
}

unsigned update(unsigned* address, unsigned (*change)(unsigned, unsigned), unsigned value,
                Site site) {
  return change_at(address, change, value, site);
}

unsigned long long update(unsigned long long* address,
                          unsigned long long (*change)(unsigned long long, unsigned long long),
                          unsigned long long value, Site site) {
  return change_at(address, change, value, site);
}

}  // namespace tk::emulator
