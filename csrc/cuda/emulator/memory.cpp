#include "memory.h"

#include <cstring>

#include "machine.h"

namespace tk::emulator {

namespace {

constexpr size_t kMaxShared = 256 * 1024;
alignas(4096) unsigned char arena[kMaxShared + 8192];
unsigned char* base = arena;
size_t size = 0;

}  // namespace

unsigned char* shared_memory() { return base; }

void begin_shared(size_t bytes, int shift) {
  base = arena + shift * kSharedAlignment;
  size = bytes;
  memset(base, kPoison, bytes);
}

void check_shared_edges() {}

void check_shared(const void* address, size_t bytes, size_t alignment, const char* name,
                  Site site) {
  const unsigned char* at = static_cast<const unsigned char*>(address);
  const long long offset = at - base;
  if (offset < 0 || offset + bytes > size) {
    fail(site, "%s at byte %lld of shared memory, which has %zu", name, offset, size);
  }
  if (reinterpret_cast<uintptr_t>(at) % alignment) {
    fail(site, "%s at byte %lld of shared memory, not a multiple of %zu", name, offset, alignment);
  }
}

void copy_later(void* shared, const void* global, bool there, Site site) {
  check_shared(shared, 16, 16, "cp.async", site);
  CopyLater copy{static_cast<unsigned char*>(shared),
                 static_cast<const unsigned char*>(global),
                 there,
                 {},
                 site};
  if (there) {
    if (reinterpret_cast<uintptr_t>(global) % 16) {
      fail(site, "cp.async from %p, not a multiple of 16", global);
    }
    memcpy(copy.bytes, global, 16);
  }
  memset(shared, kPoison, 16);
  machine().current().copies.push_back(copy);
}

void commit_copies() {
  Thread& self = machine().current();
  int earlier = 0;
  for (const int count : self.committed) earlier += count;
  self.committed.push_back(static_cast<int>(self.copies.size()) - earlier);
}

void wait_copies(int pending) {
  Thread& self = machine().current();
  const int groups = static_cast<int>(self.committed.size()) - pending;
  if (groups <= 0) return;
  int arrived = 0;
  for (int g = 0; g < groups; ++g) arrived += self.committed[g];
  for (int c = 0; c < arrived; ++c) memcpy(self.copies[c].shared, self.copies[c].bytes, 16);
  self.copies.erase(self.copies.begin(), self.copies.begin() + arrived);
  self.committed.erase(self.committed.begin(), self.committed.begin() + groups);
}

}  // namespace tk::emulator
