#include "race.h"

#include <algorithm>
#include <cstdio>

#include "fault.h"
#include "machine.h"

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

Known merged(const Known& a, const Known& b) {
  if (!b || a == b) return a;
  if (!a) return b;
  auto both = std::make_shared<std::map<unsigned, Clock>>(*a);
  for (const auto& [block, clock] : *b) join((*both)[block], clock);
  return both;
}

Known with(const Known& others, unsigned block, const Clock& clock) {
  auto all = others ? std::make_shared<std::map<unsigned, Clock>>(*others)
                    : std::make_shared<std::map<unsigned, Clock>>();
  join((*all)[block], clock);
  return all;
}

Knowledge& mine() { return current->block->races.threads[static_cast<size_t>(current->index)]; }

void step() { ++mine().here[static_cast<size_t>(current->index)]; }

void learn(Knowledge& knowledge, const Known& news) {
  if (!news) return;
  const auto own = news->find(current->block->number);
  if (own != news->end()) join(knowledge.here, own->second);
  knowledge.elsewhere = merged(knowledge.elsewhere, news);
}

bool ordered(const Record& earlier, const Knowledge& known) {
  const Clock* clock = &known.here;
  if (earlier.block != current->block->number) {
    if (!known.elsewhere) return false;
    const auto found = known.elsewhere->find(earlier.block);
    if (found == known.elsewhere->end()) return false;
    clock = &found->second;
  }
  const auto thread = static_cast<size_t>(earlier.thread);
  return thread < clock->size() && (*clock)[thread] >= earlier.step;
}

std::string describe(const Record& record) {
  const char* const verbs[] = {"read", "write", "atomic access"};
  std::string text = verbs[static_cast<int>(record.access)];
  const int copy = record.thread - current->block->thread_count;
  text += copy >= 0 ? " by an asynchronous copy" : " by thread " + std::to_string(record.thread);
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
  global_.clear();
  released_.clear();
}

void Races::begin_block(Block& block) {
  const auto threads = static_cast<size_t>(block.thread_count), all = threads + kCopyClocks;
  block.races.threads.assign(all, {});
  for (size_t n = 0; n < all; ++n) {
    block.races.threads[n].here.assign(all, 0);
    block.races.threads[n].here[n] = 1;
  }
  block.races.shared.assign((block.shared.size() + kGranule - 1) / kGranule, {});
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
  const Knowledge& known = block.races.threads[static_cast<size_t>(actor)];
  Record record{where, block.number, known.here[static_cast<size_t>(actor)], actor, 0, access};
  for (size_t done = 0; done < bytes;) {
    const size_t first = reinterpret_cast<uintptr_t>(at + done) % kGranule;
    const size_t count = std::min(bytes - done, kGranule - first);
    record.bytes = static_cast<uint16_t>(((1u << count) - 1) << first);
    check(records_of(at + done), record, known, at + done);
    done += count;
  }
}

void Races::check(Records& records, const Record& record, const Knowledge& known,
                  const void* address) {
  const bool reads = record.access == Access::kRead;
  size_t kept = 0, foreign = 0;
  for (size_t n = 0; n < records.size(); ++n) {
    Record& earlier = records[n];
    const bool earlier_reads = earlier.access == Access::kRead;
    const bool before = (earlier.thread == record.thread && earlier.block == record.block) ||
                        ordered(earlier, known);
    const bool clash = (earlier.bytes & record.bytes) && !(reads && earlier_reads) &&
                       !(earlier.access == Access::kAtomic && record.access == Access::kAtomic);
    if (clash && !before) {
      const SharedMemory& shared = current->block->shared;
      char place[80];
      if (shared.contains(address)) {
        snprintf(place, sizeof place, "byte %td of shared memory",
                 static_cast<const unsigned char*>(address) - shared.base());
      } else {
        snprintf(place, sizeof place, "global memory %p", address);
      }
      machine.leave("race at " + std::string(place) + ": " + describe(record) +
                    " is not ordered with " + describe(earlier));
    }
    // Whatever clashes with the earlier one later clashes with this one too.
    if (before && (record.access == Access::kWrite || earlier.access == record.access)) {
      earlier.bytes &= static_cast<uint16_t>(~record.bytes);
    }
    if (!earlier.bytes) continue;
    if (earlier.access != Access::kWrite && earlier.block != record.block && ++foreign > kForeign) {
      continue;
    }
    records[kept++] = earlier;
  }
  records.resize(kept);
  records.push_back(record);
}

void Races::meet(Block& block, const std::vector<int>& arrived, const std::vector<int>& waited) {
  std::vector<Knowledge>& threads = block.races.threads;
  Clock all;
  Known elsewhere;
  for (const int t : arrived) {
    Knowledge& knowledge = threads[static_cast<size_t>(t)];
    join(all, knowledge.here);
    elsewhere = merged(elsewhere, knowledge.elsewhere);
    ++knowledge.here[static_cast<size_t>(t)];
  }
  for (const int t : waited) {
    Knowledge& knowledge = threads[static_cast<size_t>(t)];
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

void Races::release(const void* address) {
  Knowledge& knowledge = mine();
  Known& released = released_[address];
  released = merged(with(knowledge.elsewhere, current->block->number, knowledge.here), released);
  step();
}

void Races::acquire(const void* address) {
  const auto found = released_.find(address);
  if (found != released_.end()) learn(mine(), found->second);
}

void Races::fence() {
  Knowledge& knowledge = mine();
  learn(knowledge, knowledge.read);
  knowledge.read = nullptr;
  knowledge.at_fence = with(knowledge.elsewhere, current->block->number, knowledge.here);
  step();
}

void Races::relaxed(const void* address, size_t bytes, const Where& where) {
  access(address, bytes, Access::kAtomic, where);
  Knowledge& knowledge = mine();
  const auto found = released_.find(address);
  if (found != released_.end()) knowledge.read = merged(knowledge.read, found->second);
  if (!knowledge.at_fence) return;
  Known& released = released_[address];
  released = merged(knowledge.at_fence, released);
}

}  // namespace tk::emulator
