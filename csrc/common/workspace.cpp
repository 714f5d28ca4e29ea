#include "common/workspace.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "common/sanitizer.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace tk {

namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t{2} << 20;

std::atomic<bool> poison_wanted{false};
std::atomic<size_t> poisoned{0};

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

void* allocate(size_t bytes) {
  const bool large = bytes >= kHugePage;
  const size_t alignment = large ? kHugePage : kAlignment, capacity = round_up(bytes, alignment);
  void* const memory = std::aligned_alloc(alignment, capacity);
  if (!memory) throw std::bad_alloc();
  expect_writes(memory, capacity);
  mark_red_zone(memory, bytes, capacity);
  return memory;
}

}  // namespace

void expect_writes(void* memory, size_t bytes) {
#if defined(__linux__)
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = round_up(begin, kHugePage),
                  last = (begin + bytes) / kHugePage * kHugePage;
  // Only a hint: if the system declines, the pages are small and nothing else changes.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

struct alignas(kAlignment) Workspace::Block {
  size_t capacity;

  void* data() { return this + 1; }

  static Block* make(size_t capacity) {
    return new (allocate(sizeof(Block) + capacity)) Block{capacity};
  }
  static void free(Block* block) { std::free(block); }

  static std::atomic<Block*> cached;
};

std::atomic<Workspace::Block*> Workspace::Block::cached{nullptr};

Workspace::Workspace(size_t bytes) {
  block_ = bytes <= kMaxCachedBytes ? Block::cached.exchange(nullptr) : nullptr;
  if (!block_ || block_->capacity < bytes) {
    Block::free(std::exchange(block_, nullptr));
    block_ = Block::make(bytes);
  }
  poison(block_->data(), bytes);
}

Workspace::~Workspace() {
  Block::free(block_->capacity <= kMaxCachedBytes ? Block::cached.exchange(block_) : block_);
}

void* Workspace::data() const { return block_->data(); }

void Workspace::release() { Block::free(Block::cached.exchange(nullptr)); }

void want_poison(bool wanted) { poison_wanted = wanted; }

void poison(void* memory, size_t bytes) {
  // An empty tensor may have no memory, and memset must not be given a null pointer.
  if (bytes == 0 || !poison_wanted.load(std::memory_order_relaxed)) return;
  std::memset(memory, 0xFF, bytes);
  poisoned += bytes;
}

size_t poisoned_bytes() { return poisoned; }

}  // namespace tk
