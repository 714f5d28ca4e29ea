#include "cuda/emulator/race.h"

#include <algorithm>
#include <cstdio>

#include "cuda/emulator/fault.h"
#include "cuda/emulator/machine.h"

namespace tk::emulator {

Races races;

namespace {

constexpr size_t kGranule = 16;
// Reads and atomics of other blocks that are kept for 16 bytes: what all blocks read would fill
// memory.
constexpr size_t kForeign = 8;

void join(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t n = 0; n < from.size(); ++n) to[n] = std::max(to[n], from[n]);
}

void join(Seen& to, const Seen& from) {
  join(to.all, from.all);
  join(to.fenced, from.fenced);
}

Known merged(const Known& a, const Known& b) {
  if (!b || a == b) return a;
  if (!a) return b;
  auto both = std::make_shared<std::map<unsigned, Seen>>(*a);
  for (const auto& [block, seen] : *b) join((*both)[block], seen);
  return both;
}

Known with(const Known& others, unsigned block, const Seen& seen) {
  auto all = others ? std::make_shared<std::map<unsigned, Seen>>(*others)
                    : std::make_shared<std::map<unsigned, Seen>>();
  join((*all)[block], seen);
  return all;
}

Knowledge& knowledge_of(Block& block, int thread) {
  return block.races.threads[static_cast<size_t>(thread)];
}

Knowledge& mine() { return knowledge_of(*current->block, current->index); }

uint32_t& own_step(Knowledge& knowledge, int thread) {
  return knowledge.here.all[static_cast<size_t>(thread)];
}

// What this thread does from now on is not part of what it has told.
void next_step() { ++own_step(mine(), current->index); }

bool reads(Access access) { return access == Access::kRead || access == Access::kAsyncRead; }

bool is_async(Access access) {
  return access == Access::kAsyncRead || access == Access::kAsyncWrite;
}

bool covers(const Clock& clock, const Record& record) {
  const auto thread = static_cast<size_t>(record.thread);
  return thread < clock.size() && clock[thread] >= record.step;
}

bool is_before(const Record& earlier, const Record& later, const Knowledge& known, bool shared) {
  const bool same_block = earlier.block == later.block;
  const Seen* seen = &known.here;
  if (!same_block) {
    if (!known.elsewhere) return false;
    const auto found = known.elsewhere->find(earlier.block);
    if (found == known.elsewhere->end()) return false;
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
  const Where& where = record.where;
  return text + " at " + (where.site.file ? describe(where.site) : describe_code(where.code));
}

bool is_own_memory(const void* address) {
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

void Races::begin_launch(bool look) {
  on = look, busy = false;
  thread = pthread_self();
  global_.clear();
  released_.clear();
}

void Races::begin_block(Block& block) {
  const auto threads = static_cast<size_t>(block.thread_count), all = threads + kAsyncClocks;
  block.races.threads.assign(all, {});
  for (size_t n = 0; n < all; ++n) {
    Seen& here = block.races.threads[n].here;
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

void Races::access(const void* address, size_t bytes, Access access, const Where& where) {
  this->access(address, bytes, access, where, current->index);
}

void Races::access(const void* address, size_t bytes, Access access, const Where& where,
                   int actor) {
  if (is_own_memory(address)) return;
  Block& block = *current->block;
  const auto* at = static_cast<const unsigned char*>(address);
  if (block.shared.surrounds(at) &&
      !(block.shared.contains(at) && block.shared.contains(at + bytes - 1))) {
    const std::string text = "byte " + std::to_string(at - block.shared.base()) +
                             " of shared memory, which has " + std::to_string(block.shared.size());
    if (where.site.file) fail(where.site, "%s", text.c_str());
    machine.leave(where.code, text);
  }
  if (!block.shared.contains(at)) check_extent(at, bytes, access, where);
  Knowledge& known = knowledge_of(block, actor);
  Record record{where, block.number, own_step(known, actor), actor, 0, access};
  for (size_t done = 0; done < bytes;) {
    const size_t first = reinterpret_cast<uintptr_t>(at + done) % kGranule;
    const size_t count = std::min(bytes - done, kGranule - first);
    record.bytes = static_cast<uint16_t>(((1u << count) - 1) << first);
    check(records_of(at + done), record, known, at + done);
    done += count;
  }
}

void Races::check_extent(const void* address, size_t bytes, Access access, const Where& where) {
  const std::vector<Extent>& extents = options().global;
  if (extents.empty()) return;
  const auto* at = static_cast<const char*>(address);
  for (const Extent& extent : extents) {
    const auto* begin = static_cast<const char*>(extent.begin);
    if (at >= begin && at + bytes <= begin + extent.bytes) return;
  }
  char text[120];
  snprintf(text, sizeof text, "%s of %zu bytes at %p, outside of the global memory it was given",
           reads(access) ? "read" : "write", bytes, address);
  if (where.site.file) fail(where.site, "%s", text);
  machine.leave(where.code, text);
}

void Races::check(Records& records, const Record& record, const Knowledge& known,
                  const void* address) {
  size_t kept = 0, foreign = 0;
  const bool shared = current->block->shared.contains(address);
  for (size_t n = 0; n < records.size(); ++n) {
    Record& earlier = records[n];
    const bool before = is_before(earlier, record, known, shared);
    const bool clash = (earlier.bytes & record.bytes) &&
                       !(reads(record.access) && reads(earlier.access)) &&
                       !(earlier.access == Access::kAtomic && record.access == Access::kAtomic);
    if (clash && !before) {
      char place[80];
      if (shared) {
        snprintf(place, sizeof place, "byte %td of shared memory",
                 static_cast<const unsigned char*>(address) - current->block->shared.base());
      } else {
        snprintf(place, sizeof place, "global memory %p", address);
      }
      machine.leave("race at " + std::string(place) + ": " + describe(record) +
                    " is not ordered with " + describe(earlier));
    }
    // Whatever clashes with the earlier one later clashes with this one too.
    const bool covers_all = record.access == Access::kWrite || record.access == Access::kAsyncWrite;
    if (before && (covers_all || earlier.access == record.access)) {
      earlier.bytes &= static_cast<uint16_t>(~record.bytes);
    }
    if (!earlier.bytes) continue;
    if (earlier.access != Access::kWrite && earlier.block != record.block && ++foreign > kForeign) {
      continue;
    }
    if (kept != n) records[kept] = earlier;
    ++kept;
  }
  records.resize(kept);
  records.push_back(record);
}

void Races::meet(Block& block, const std::vector<int>& arrived, const std::vector<int>& waited) {
  Seen all;
  Known elsewhere;
  for (const int t : arrived) {
    Knowledge& knowledge = knowledge_of(block, t);
    join(all, knowledge.here);
    elsewhere = merged(elsewhere, knowledge.elsewhere);
    ++own_step(knowledge, t);
  }
  for (const int t : waited) {
    Knowledge& knowledge = knowledge_of(block, t);
    join(knowledge.here, all);
    knowledge.elsewhere = elsewhere;
  }
}

void Races::meet_lanes(uint32_t lanes) {
  std::vector<int> threads;
  for (; lanes; lanes &= lanes - 1) {
    threads.push_back(current->index / kWarp * kWarp + __builtin_ctz(lanes));
  }
  meet(*current->block, threads, threads);
}

void Races::tell(Known& known) {
  known = merged(with(mine().elsewhere, current->block->number, mine().here), known);
  next_step();
}

void Races::learn(const Known& known) {
  if (!known) return;
  Knowledge& knowledge = mine();
  const auto own = known->find(current->block->number);
  if (own != known->end()) join(knowledge.here, own->second);
  knowledge.elsewhere = merged(knowledge.elsewhere, known);
}

void Races::merge(Known& into, const Known& known) { into = merged(into, known); }

void Races::release(const void* address) { tell(released_[address]); }

void Races::acquire(const void* address) {
  const auto found = released_.find(address);
  if (found != released_.end()) learn(found->second);
}

void Races::fence() {
  Knowledge& knowledge = mine();
  learn(knowledge.read);
  knowledge.read = knowledge.at_fence = nullptr;
  tell(knowledge.at_fence);
}

Access Races::sum() const { return options().ordered_sums ? Access::kWrite : Access::kAtomic; }

void Races::relaxed(const void* address, size_t bytes, const Where& where) {
  access(address, bytes, Access::kAtomic, where);
  Knowledge& knowledge = mine();
  const auto found = released_.find(address);
  if (found != released_.end()) knowledge.read = merged(knowledge.read, found->second);
  if (!knowledge.at_fence) return;
  Known& released = released_[address];
  released = merged(knowledge.at_fence, released);
}

Step Races::begin_async() {
  BlockRaces& races = current->block->races;
  const int thread = current->block->thread_count + races.next_async++ % kAsyncClocks;
  Knowledge& knowledge = knowledge_of(*current->block, thread);
  const uint32_t step = own_step(knowledge, thread) + 1;
  knowledge = mine();
  own_step(knowledge, thread) = step;
  return {thread, step};
}

void Races::go_on_async(Step step) {
  join(knowledge_of(*current->block, step.thread).here, mine().here);
}

void Races::end_async(Block& block, Step step, int thread) {
  uint32_t& known = knowledge_of(block, thread).here.all[static_cast<size_t>(step.thread)];
  known = std::max(known, step.step);
}

void Races::end_async(Block& block, Step step, Known& known) {
  Seen seen;
  seen.all.assign(static_cast<size_t>(step.thread) + 1, 0);
  seen.all.back() = step.step;
  known = merged(known, with(nullptr, block.number, seen));
}

void Races::fence_async() {
  Seen& here = mine().here;
  here.fenced = here.all;
  next_step();
}

}  // namespace tk::emulator
