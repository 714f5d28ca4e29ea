// Kernel memory: per-call scratch, and poisoning of fresh memory for tests.
#pragma once

#include <cstddef>

#include "common/sanitizer.h"

namespace tk {

// RAII scratch memory, 64-byte aligned, with unspecified content.
//
// Fresh pages can cost more than a short call computes: at (B, H, S, D) = (32, 8, 64, 32) page
// faults were a tenth of its time. One block of at most kMaxCachedBytes is therefore cached between
// calls. A concurrent call allocates its own block.
class Workspace {
 public:
  explicit Workspace(size_t bytes);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data() const;

  // Frees the cached block.
  static void release();

  // Under AddressSanitizer no block is cached, so that overruns and uses after a call are detected.
  static constexpr size_t kMaxCachedBytes = kAddressSanitizer ? 0 : size_t{64} << 20;

 private:
  struct Block;
  Block* block_;
};

// Requests huge pages for memory that will be fully written, where whole huge pages fit. Faults on
// small pages can cost more than the stores: two thirds of the gradient of a large bias.
void expect_writes(void* memory, size_t bytes);

// Poisoning, for tests: while enabled, `poison` fills fresh memory with 0xFF bytes, which is NaN in
// every floating-point type. Workspaces and the operators' outputs pass through it.
void want_poison(bool wanted);
void poison(void* memory, size_t bytes);

// Total bytes poisoned so far.
size_t poisoned_bytes();

}  // namespace tk
