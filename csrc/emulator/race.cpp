#include "emulator/race.h"

#include <algorithm>
#include <cstdio>

#include "emulator/fault.h"
#include "emulator/machine.h"

namespace tk::emulator {

Races races;

namespace {

constexpr size_t kGranule = 16;
// Limit of recorded reads and atomics of other blocks for each granule. Without it, memory that all
// blocks read would need a record for each block.
constexpr size_t kMaxOtherBlockRecords = 8;

void join(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t n = 0; n < from.size(); ++n) to[n] = std::max(to[n], from[n]);
}

void join(BlockClocks& to, const BlockClocks& from) {
  join(to.all, from.all);
  join(to.fenced, from.fenced);
}

SharedClocks merged(const SharedClocks& a, const SharedClocks& b) {
  if (!b || a == b) return a;
  if (!a) return b;
  auto both = std::make_shared<std::map<unsigned, BlockClocks>>(*a);
  for (const auto& [block, seen] : *b) join((*both)[block], seen);
  return both;
}

SharedClocks with_block(const SharedClocks& others, unsigned block, const BlockClocks& seen) {
  auto all = others ? std::make_shared<std::map<unsigned, BlockClocks>>(*others)
                    : std::make_shared<std::map<unsigned, BlockClocks>>();
  join((*all)[block], seen);
  return all;
}

ThreadClocks& clocks_of(Block& block, int thread) {
  return block.races.threads[static_cast<size_t>(thread)];
}

ThreadClocks& current_clocks() { return clocks_of(*current->block, current->index); }

uint32_t& own_step(ThreadClocks& clocks, int thread) {
  return clocks.own_block.all[static_cast<size_t>(thread)];
}

// Advances the clock: later accesses are not covered by clocks published before.
void next_step() { ++own_step(current_clocks(), current->index); }

bool reads(Access access) { return access == Access::kRead || access == Access::kAsyncRead; }

bool is_async(Access access) {
  return access == Access::kAsyncRead || access == Access::kAsyncWrite;
}

bool covers(const Clock& clock, const Record& record) {
  const auto thread = static_cast<size_t>(record.thread);
  return thread < clock.size() && clock[thread] >= record.step;
}

bool is_before(const Record& earlier, const Record& later, const ThreadClocks& known, bool shared) {
  const bool same_block = earlier.block == later.block;
  const BlockClocks* seen = &known.own_block;
  if (!same_block) {
    if (!known.other_blocks) return false;
    const auto found = known.other_blocks->find(earlier.block);
    if (found == known.other_blocks->end()) return false;
    seen = &found->second;
  }
  if (shared && is_async(later.access) && earlier.access == Access::kWrite)
    return covers(seen->fenced, earlier);
  return (same_block && earlier.thread == later.thread) || covers(seen->all, earlier);
}

std::string describe(const Record& record) {
  const char* const verbs[] = {"read", "write", "atomic access", "asynchronous read",
                               "asynchronous write"};
  std::string text = verbs[static_cast<int>(record.access)];
  if (record.thread < current->block->thread_count) {
    text += " by thread " + std::to_string(record.thread);
  }
  if (record.block != current->block->number) text += " of block " + std::to_string(record.block);
  const Location& location = record.location;
  return text + " at " +
         (location.site.file ? describe(location.site) : describe_code(location.code));
}

bool is_untracked(const void* address) {
  const auto* at = static_cast<const char*>(address);
  const auto within = [at](const void* begin, size_t bytes) {
    const auto* from = static_cast<const char*>(begin);
    return at >= from && at < from + bytes;
  };
  const Launch& launch = machine.launched();
  return current->block->stacks.contains(address) || within(&threadIdx, sizeof threadIdx) ||
         within(&blockIdx, sizeof blockIdx) || within(&blockDim, sizeof blockDim) ||
         within(&gridDim, sizeof gridDim) || within(launch.arguments, launch.argument_bytes);
}

}  // namespace

void Races::begin_launch(bool enabled) {
  on = enabled, in_handler = false;
  thread = pthread_self();
  global_.clear();
  released_.clear();
}

void Races::begin_block(Block& block) {
  const auto threads = static_cast<size_t>(block.thread_count), all = threads + kAsyncClocks;
  block.races.threads.assign(all, {});
  for (size_t n = 0; n < all; ++n) {
    BlockClocks& here = block.races.threads[n].own_block;
    here.all.assign(all, 0);
    here.fenced.assign(all, 0);
    here.all[n] = 1;
  }
  block.races.shared.assign((block.shared.size() + kGranule - 1) / kGranule, {});
  block.races.next_async = 0;
}

Records& Races::records_of(const void* address) {
  Block& block = *current->block;
  if (!block.shared.contains(address)) {
    return global_[reinterpret_cast<uintptr_t>(address) / kGranule];
  }
  const auto offset = static_cast<const unsigned char*>(address) - block.shared.base();
  return block.races.shared[static_cast<size_t>(offset) / kGranule];
}

void Races::access(const void* address, size_t bytes, Access access, const Location& location) {
  this->access(address, bytes, access, location, current->index);
}

void Races::access(const void* address, size_t bytes, Access access, const Location& location,
                   int actor) {
  if (is_untracked(address)) return;
  Block& block = *current->block;
  const auto* at = static_cast<const unsigned char*>(address);
  if (block.shared.in_guarded_range(at) &&
      !(block.shared.contains(at) && block.shared.contains(at + bytes - 1))) {
    const std::string text = "access to byte " + std::to_string(at - block.shared.base()) +
                             " of shared memory, which has " + std::to_string(block.shared.size()) +
                             " bytes";
    if (location.site.file) fail(location.site, "%s", text.c_str());
    machine.abort_launch(location.code, text);
  }
  if (!block.shared.contains(at)) check_extent(at, bytes, access, location);
  ThreadClocks& known = clocks_of(block, actor);
  Record record{location, block.number, own_step(known, actor), actor, 0, access};
  for (size_t done = 0; done < bytes;) {
    const size_t first = reinterpret_cast<uintptr_t>(at + done) % kGranule;
    const size_t count = std::min(bytes - done, kGranule - first);
    record.bytes = static_cast<uint16_t>(((1u << count) - 1) << first);
    check(records_of(at + done), record, known, at + done);
    done += count;
  }
}

void Races::check_extent(const void* address, size_t bytes, Access access,
                         const Location& location) {
  const std::vector<Extent>& extents = settings().global;
  if (extents.empty()) return;
  const auto* at = static_cast<const char*>(address);
  for (const Extent& extent : extents) {
    const auto* begin = static_cast<const char*>(extent.begin);
    if (at >= begin && at + bytes <= begin + extent.bytes) return;
  }
  char text[120];
  snprintf(text, sizeof text, "%s of %zu bytes at %p, outside of the global memory of this call",
           reads(access) ? "read" : "write", bytes, address);
  if (location.site.file) fail(location.site, "%s", text);
  machine.abort_launch(location.code, text);
}

void Races::check(Records& records, const Record& record, const ThreadClocks& known,
                  const void* address) {
  size_t kept = 0, other_block_records = 0;
  const bool shared = current->block->shared.contains(address);
  for (size_t n = 0; n < records.size(); ++n) {
    Record& earlier = records[n];
    const bool before = is_before(earlier, record, known, shared);
    const bool conflicts = (earlier.bytes & record.bytes) &&
                           !(reads(record.access) && reads(earlier.access)) &&
                           !(earlier.access == Access::kAtomic && record.access == Access::kAtomic);
    if (conflicts && !before) {
      char place[80];
      if (shared) {
        snprintf(place, sizeof place, "byte %td of shared memory",
                 static_cast<const unsigned char*>(address) - current->block->shared.base());
      } else {
        snprintf(place, sizeof place, "global memory %p", address);
      }
      machine.abort_launch("race at " + std::string(place) + ": " + describe(record) +
                           " is not ordered with " + describe(earlier));
    }
    // Drop the earlier bytes: any later access that conflicts with them conflicts with these too.
    const bool covers_all = record.access == Access::kWrite || record.access == Access::kAsyncWrite;
    if (before && (covers_all || earlier.access == record.access)) {
      earlier.bytes &= static_cast<uint16_t>(~record.bytes);
    }
    if (!earlier.bytes) continue;
    if (earlier.access != Access::kWrite && earlier.block != record.block &&
        ++other_block_records > kMaxOtherBlockRecords) {
      continue;
    }
    if (kept != n) records[kept] = earlier;
    ++kept;
  }
  records.resize(kept);
  records.push_back(record);
}

void Races::synchronize(Block& block, const std::vector<int>& arrived,
                        const std::vector<int>& waited) {
  BlockClocks all;
  SharedClocks other_blocks;
  for (const int t : arrived) {
    ThreadClocks& clocks = clocks_of(block, t);
    join(all, clocks.own_block);
    other_blocks = merged(other_blocks, clocks.other_blocks);
    ++own_step(clocks, t);
  }
  for (const int t : waited) {
    ThreadClocks& clocks = clocks_of(block, t);
    join(clocks.own_block, all);
    clocks.other_blocks = other_blocks;
  }
}

void Races::synchronize_lanes(uint32_t lanes) {
  std::vector<int> threads;
  for (; lanes; lanes &= lanes - 1) {
    threads.push_back(current->index / kWarp * kWarp + __builtin_ctz(lanes));
  }
  synchronize(*current->block, threads, threads);
}

void Races::publish(SharedClocks& known) {
  known = merged(
      with_block(current_clocks().other_blocks, current->block->number, current_clocks().own_block),
      known);
  next_step();
}

void Races::observe(const SharedClocks& known) {
  if (!known) return;
  ThreadClocks& clocks = current_clocks();
  const auto own = known->find(current->block->number);
  if (own != known->end()) join(clocks.own_block, own->second);
  clocks.other_blocks = merged(clocks.other_blocks, known);
}

void Races::merge(SharedClocks& into, const SharedClocks& known) { into = merged(into, known); }

void Races::release(const void* address) { publish(released_[address]); }

void Races::acquire(const void* address) {
  const auto found = released_.find(address);
  if (found != released_.end()) observe(found->second);
}

void Races::fence() {
  ThreadClocks& clocks = current_clocks();
  observe(clocks.pending_acquire);
  clocks.pending_acquire = clocks.at_fence = nullptr;
  publish(clocks.at_fence);
}

Access Races::float_add_access() const {
  return settings().ordered_sums ? Access::kWrite : Access::kAtomic;
}

void Races::relaxed(const void* address, size_t bytes, const Location& location) {
  access(address, bytes, Access::kAtomic, location);
  ThreadClocks& clocks = current_clocks();
  const auto found = released_.find(address);
  if (found != released_.end())
    clocks.pending_acquire = merged(clocks.pending_acquire, found->second);
  if (!clocks.at_fence) return;
  SharedClocks& released = released_[address];
  released = merged(clocks.at_fence, released);
}

Step Races::begin_async() {
  BlockRaces& races = current->block->races;
  const int thread = current->block->thread_count + races.next_async++ % kAsyncClocks;
  ThreadClocks& clocks = clocks_of(*current->block, thread);
  const uint32_t step = own_step(clocks, thread) + 1;
  clocks = current_clocks();
  own_step(clocks, thread) = step;
  return {thread, step};
}

void Races::continue_async(Step step) {
  join(clocks_of(*current->block, step.thread).own_block, current_clocks().own_block);
}

void Races::end_async(Block& block, Step step, int thread) {
  uint32_t& known = clocks_of(block, thread).own_block.all[static_cast<size_t>(step.thread)];
  known = std::max(known, step.step);
}

void Races::end_async(Block& block, Step step, SharedClocks& known) {
  BlockClocks seen;
  seen.all.assign(static_cast<size_t>(step.thread) + 1, 0);
  seen.all.back() = step.step;
  known = merged(known, with_block(nullptr, block.number, seen));
}

void Races::fence_async() {
  BlockClocks& here = current_clocks().own_block;
  here.fenced = here.all;
  next_step();
}

}  // namespace tk::emulator
