#include "emulator/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "emulator/machine.h"

namespace tk::emulator {

namespace {

// Shared-memory addresses have 18 bits in the matrix descriptors of sm_90.
constexpr size_t kWindow = 256 * 1024;
constexpr size_t kGuard = 64 * 1024;  // a multiple of every page size
constexpr size_t kRedZone = 4096;     // bytes on either side checked when the block exits

bool is_poison(const unsigned char* begin, const unsigned char* end) {
  return std::all_of(begin, end, [](unsigned char byte) { return byte == kPoison; });
}

}  // namespace

SharedMemory::~SharedMemory() {
  if (window_) munmap(window_ - kGuard, kWindow + 2 * kGuard);
}

void SharedMemory::begin(size_t bytes, size_t shift) {
  if (!window_) {
    void* memory =
        mmap(nullptr, kWindow + 2 * kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    window_ = static_cast<unsigned char*>(memory) + kGuard;
    mprotect(window_, kWindow, PROT_READ | PROT_WRITE);
  }
  const size_t rounded = (bytes + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
  base_ = window_ + kWindow - rounded - shift * kSharedAlignment;
  size_ = bytes;
  memset(base_ - kRedZone, kPoison, static_cast<size_t>(window_ + kWindow - base_) + kRedZone);
}

bool SharedMemory::written_outside() const {
  return !is_poison(base_ - kRedZone, base_) || !is_poison(base_ + size_, window_ + kWindow);
}

uint32_t SharedMemory::address(const void* shared) const {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(shared) - window_);
}

bool SharedMemory::contains(const void* address) const {
  const auto* at = static_cast<const unsigned char*>(address);
  return at >= base_ && at < base_ + size_;
}

bool SharedMemory::in_guarded_range(const void* address) const {
  const auto* at = static_cast<const unsigned char*>(address);
  return window_ && at >= window_ - kGuard && at < window_ + kWindow + kGuard;
}

unsigned char* shared_memory() { return current->block->shared.base(); }

uint32_t shared_address(const void* shared) { return current->block->shared.address(shared); }

void check_shared(const void* address, size_t bytes, size_t alignment, const char* name,
                  Site site) {
  const SharedMemory& shared = current->block->shared;
  const auto* at = static_cast<const unsigned char*>(address);
  const long long offset = at - shared.base();
  if (!shared.in_guarded_range(address))
    fail(site, "%s: %p is not in shared memory", name, address);
  if (offset < 0 || static_cast<size_t>(offset) + bytes > shared.size()) {
    fail(site, "%s: bytes %lld to %lld of shared memory, which has %zu bytes", name, offset,
         offset + static_cast<long long>(bytes), shared.size());
  }
  if (reinterpret_cast<uintptr_t>(at) % alignment) {
    fail(site, "%s: byte %lld of shared memory; must be a multiple of %zu", name, offset,
         alignment);
  }
}

void copy_async(void* shared, const void* global, bool valid, Site site) {
  check_shared(shared, 16, 16, "cp.async", site);
  AsyncCopy copy{static_cast<unsigned char*>(shared),
                 static_cast<const unsigned char*>(global),
                 valid,
                 {},
                 site};
  if (valid) {
    if (reinterpret_cast<uintptr_t>(global) % 16) {
      fail(site, "cp.async: reads %p; must be a multiple of 16", global);
    }
    if (races.on) races.access(global, 16, Access::kRead, {site});
    memcpy(copy.bytes, global, 16);
  }
  if (races.on) races.access(shared, 16, Access::kWrite, {site});
  memset(shared, kPoison, 16);
  current->copies.copies.push_back(copy);
  ++current->copies.uncommitted;
}

void commit_copies() {
  CopyQueue& queue = current->copies;
  queue.groups.push_back(queue.uncommitted);
  queue.uncommitted = 0;
}

void wait_copies(int pending) {
  CopyQueue& queue = current->copies;
  const long groups = static_cast<long>(queue.groups.size()) - pending;
  if (groups <= 0) return;
  long count = 0;
  for (long g = 0; g < groups; ++g) count += queue.groups[static_cast<size_t>(g)];
  for (long n = 0; n < count; ++n) {
    const AsyncCopy& copy = queue.copies[static_cast<size_t>(n)];
    if (copy.valid && memcmp(copy.bytes, copy.global, 16) != 0) {
      fail(copy.site, "cp.async: its source %p was written before the copy was waited for",
           static_cast<const void*>(copy.global));
    }
    if (races.on) races.access(copy.shared, 16, Access::kWrite, {copy.site});
    memcpy(copy.shared, copy.bytes, 16);
  }
  queue.copies.erase(queue.copies.begin(), queue.copies.begin() + count);
  queue.groups.erase(queue.groups.begin(), queue.groups.begin() + groups);
}

}  // namespace tk::emulator
