// Shuffles, votes and atomics.
#include <type_traits>

#include "emulator/machine.h"

namespace tk::emulator {

namespace {

template <typename Do>
void for_each_lane(uint32_t lanes, Do&& run) {
  for (; lanes; lanes &= lanes - 1) run(__builtin_ctz(lanes));
}

void run_shuffle(uint32_t lanes, void* const* operands) {
  uint64_t value[kWarp];
  for_each_lane(lanes,
                [&](int lane) { value[lane] = static_cast<Exchange*>(operands[lane])->value; });
  for_each_lane(lanes, [&](int lane) {
    Exchange& mine = *static_cast<Exchange*>(operands[lane]);
    if (!(lanes >> (mine.source & 31) & 1)) {
      fail(mine.site, "shuffle: lane %d reads lane %d, which is not in the lane mask", lane,
           mine.source);
    }
    mine.value = value[mine.source & 31];
  });
}

void run_ballot(uint32_t lanes, void* const* operands) {
  uint32_t votes = 0;
  for_each_lane(lanes, [&](int lane) {
    votes |= static_cast<uint32_t>(static_cast<Exchange*>(operands[lane])->value) << lane;
  });
  for_each_lane(lanes, [&](int lane) { static_cast<Exchange*>(operands[lane])->value = votes; });
}

void run_sync(uint32_t lanes, void* const*) {
  if (races.on) races.synchronize_lanes(lanes);
}

template <typename T>
T checked_update(T* address, T (*operation)(T, T), T value, Site site) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T)) {
    fail(site, "atomic: address %p; must be a multiple of %zu", static_cast<void*>(address),
         sizeof(T));
  }
  machine.maybe_yield();
  if (races.on && std::is_floating_point_v<T>) {
    races.access(address, sizeof(T), races.float_add_access(), {site});
  } else if (races.on) {
    races.relaxed(address, sizeof(T), {site});
  }
  const T old = *address;
  *address = operation(old, value);
  machine.note_progress();
  return old;
}

}  // namespace

const Collective kShuffle{"shuffle", run_shuffle, true};
const Collective kBallot{"vote", run_ballot, true};
const Collective kSyncWarp{"__syncwarp", run_sync, false};

float atomic_update(float* address, float (*operation)(float, float), float value, Site site) {
  return checked_update(address, operation, value, site);
}

int atomic_update(int* address, int (*operation)(int, int), int value, Site site) {
  return checked_update(address, operation, value, site);
}

unsigned atomic_update(unsigned* address, unsigned (*operation)(unsigned, unsigned), unsigned value,
                       Site site) {
  return checked_update(address, operation, value, site);
}

unsigned long long atomic_update(unsigned long long* address,
                                 unsigned long long (*operation)(unsigned long long,
                                                                 unsigned long long),
                                 unsigned long long value, Site site) {
  return checked_update(address, operation, value, site);
}

}  // namespace tk::emulator
