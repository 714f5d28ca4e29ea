// Memory that kernels are given: scratch for one call, and poison for tests.
#pragma once

#include <cstddef>

namespace tk {

// 64-byte aligned memory of unspecified content, as long as this lives.
//
// Fresh pages cost more than a short call computes: at (B, H, S, D) = (32, 8, 64, 32) page faults
// were a tenth of its time. So one block is kept from call to call, of kMostKept bytes at most; a
// call that overlaps with another one allocates for itself.
class Workspace {
 public:
  explicit Workspace(size_t bytes);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data() const;

  // Frees the block that is kept.
  static void release();

  static constexpr size_t kMostKept = size_t{64} << 20;

 private:
  struct Block;
  Block* block_;
};

// For memory that will be written as a whole: asks for huge pages, where some fit into it. Fresh
// small pages cost more than what is written to them: two thirds of the gradient of a large bias.
void expect_writes(void* memory, size_t bytes);

// While poison is wanted, `poison` fills fresh memory with ones: NaN in every floating-point type.
// Workspaces and the operators' outputs pass through it.
void want_poison(bool wanted);
void poison(void* memory, size_t bytes);

// How much has been filled so far.
size_t poisoned_bytes();

}  // namespace tk
