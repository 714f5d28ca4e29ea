// State of a block for the instructions of sm_90. Internal; kernels include sm90_ptx.h.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cuda/platform/tensor_box.h"
#include "emulator/core.h"
#include "emulator/race.h"

namespace tk::emulator {

struct Block;

struct MBarrier {
  uint32_t expected, pending;  // arrivals
  int64_t bytes = 0;           // expected and not yet arrived
  unsigned phase = 0;
  bool fenced = false;      // visible to TMA
  bool copies = false;      // true if copies completed in this phase
  bool unobserved = false;  // true if copies completed and no thread has waited for them
  int owner;                // thread that initialised it
  // Clocks that waiters observe: of arrivals in this phase, and of completed phases.
  SharedClocks arriving, ended;
};

// A TMA transfer: a box of a tensor or, if the rank is 0, contiguous bytes.
struct Transfer {
  cuda::TensorBox tensor;
  int at[cuda::kTensorRank];
  unsigned char* shared;
  unsigned char* global;  // of contiguous bytes
  size_t bytes;
  Site site;
  Step step;  // of its shared-memory access
};

struct Load {
  Transfer transfer;
  std::vector<unsigned char> data;  // the box in row-major order
  uint32_t barrier;
};

struct Store {
  Transfer transfer;
  bool add;
  uint64_t hash;                    // of the source at issue
  std::vector<unsigned char> data;  // empty until shared memory is read
  Step write;                       // of its global-memory access
};

// Pending stores of one thread, oldest first, and the size of each committed group.
struct StoreQueue {
  std::vector<Store> stores;
  std::vector<size_t> groups;
  size_t uncommitted = 0;
};

// A decoded matrix descriptor of wgmma.
struct MatrixDescriptor {
  uint32_t start, leading, stride;
  unsigned chunks;  // 16-byte chunks in a swizzled row
  bool mn_major;
};

// Accumulator registers of a warp. The lanes' copies are poison while products are in flight.
struct Accumulator {
  float* lane_registers[kWarp];
  int count;
  std::vector<float> values;  // (32, count)
  int products = 0;           // in flight
};

struct WarpProduct {
  const float* key;  // of its accumulator
  uint64_t a, b;
  const uint32_t* a_registers[kWarp];  // of each lane; null if a is a descriptor
  bool a_mn_major, b_mn_major, bfloat16, accumulate;
  uint64_t hash;  // of the operands at issue
  Site site;
};

struct WarpProducts {
  std::vector<WarpProduct> products;  // oldest first
  std::vector<size_t> groups;
  size_t uncommitted = 0;
  std::map<const float*, Accumulator> accumulators;
  bool fenced = false;          // wgmma.fence since the last wait
  size_t done = 0, waited = 0;  // number of products computed and waited for
  std::vector<Step> steps;      // of each issued product
};

// A product as issued by the first warp of a warpgroup. The other warps must issue the same.
struct IssuedProduct {
  uint64_t a, b;
  int count;
  bool a_in_registers, a_mn_major, b_mn_major, bfloat16, accumulate;
  Site site;
};

struct Sm90 {
  bool used = false;
  std::vector<unsigned char> async;  // shared memory as TMA and wgmma see it
  std::map<uint32_t, MBarrier> barriers;
  std::vector<Load> loads;
  std::vector<StoreQueue> stores;                  // of each thread
  std::vector<WarpProducts> products;              // of each warp
  std::vector<std::vector<IssuedProduct>> issues;  // of each warpgroup
  std::vector<int> registers;                      // per thread, for each warp
};

// State of the current block, initialised at its first use.
Sm90& sm90();
// The async-proxy copy of a shared-memory address, as TMA and wgmma see it.
unsigned char* async_view(Block& block, const void* address);
// Hash of 16 bytes of shared memory in both views, generic and async proxy.
uint64_t hash_chunk(uint64_t hash, Block& block, const void* address);

// Completes one pending load. Returns false if there is none.
bool deliver_load(Block& block);
void complete_bytes(Block& block, uint32_t barrier, size_t bytes, Step step);
// Address of an mbarrier. Fails unless it is visible to TMA.
uint32_t barrier_for_copy(const uint64_t* barrier, const char* name, Site site);
void finish_stores(Block& block);
// Completes the block after all threads have exited. Returns an error message, or an empty string.
std::string finish(Block& block);
std::string describe_mbarrier(const Block& block, uint32_t barrier);

}  // namespace tk::emulator
