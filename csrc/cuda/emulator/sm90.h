// What a block keeps for the instructions of sm_90. The emulator's own; kernels see sm90_ptx.h.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cuda/emulator/core.h"
#include "cuda/emulator/race.h"
#include "cuda/platform/sm90_tensor_map.h"

namespace tk::emulator {

struct Block;

struct MBarrier {
  uint32_t expected, pending;  // arrivals
  int64_t bytes = 0;           // announced and not yet there
  unsigned phase = 0;
  bool fenced = false;    // so that TMA sees it
  bool copies = false;    // arrive in this phase
  bool unseen = false;    // copies have arrived that nobody has waited for
  int owner;              // who initialised it
  Known arriving, ended;  // what waiters learn: of this phase, of those before
};

// A box of a tensor, or bytes in a row where rank is 0.
struct Transfer {
  cuda::TensorBox tensor;
  int at[cuda::kTensorRank];
  unsigned char* shared;
  unsigned char* global;  // of bytes in a row
  size_t bytes;
  Site site;
  Step step;  // to or from shared memory
};

struct Load {
  Transfer transfer;
  std::vector<unsigned char> data;  // of the box, rows in order
  uint32_t barrier;
};

struct Store {
  Transfer transfer;
  bool add;
  uint64_t hash;                    // of what is read, at issue
  std::vector<unsigned char> data;  // once it is read
  Step write;
};

// Those of one thread, oldest first, and how many are in each group that was committed.
struct StoreQueue {
  std::vector<Store> stores;
  std::vector<size_t> groups;
  size_t uncommitted = 0;
};

// A matrix in shared memory, as its descriptor says.
struct MatrixPlace {
  uint32_t start, leading, stride;
  unsigned chunks;  // of a swizzled row
  bool mn_major;
};

// The numbers of a warp's lanes that a product is added to. They are poison while it is under way.
struct Accumulator {
  float* of_lane[kWarp];
  int count;
  std::vector<float> values;  // (32, count)
  int products = 0;           // under way
};

struct WarpProduct {
  const float* key;  // of its accumulator
  uint64_t a, b;
  const uint32_t* a_of_lane[kWarp];  // or null: a is a descriptor
  bool a_mn_major, b_mn_major, bfloat16, accumulate;
  uint64_t hash;  // of the operands, at issue
  Site site;
};

struct WarpProducts {
  std::vector<WarpProduct> products;  // oldest first
  std::vector<size_t> groups;
  size_t uncommitted = 0;
  std::map<const float*, Accumulator> accumulators;
  bool fenced = false;          // since registers were last touched
  size_t done = 0, waited = 0;  // products, since the block began
  std::vector<Step> steps;      // of each product that was issued
};

// What the first warp of a warpgroup issued; the others must issue the same.
struct Issue {
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
  std::vector<StoreQueue> stores;          // of each thread
  std::vector<WarpProducts> products;      // of each warp
  std::vector<std::vector<Issue>> issues;  // of each warpgroup
  std::vector<int> registers;              // of each thread of a warp
};

// Of the current block, made ready at its first use.
Sm90& sm90();
// As TMA and wgmma see it: `address` is in the memory that threads see.
unsigned char* async_view(Block& block, const void* address);
// Of 16 bytes as threads see them and as TMA and wgmma do.
uint64_t hash_chunk(uint64_t hash, Block& block, const void* address);

// Lets a load arrive; false: none is under way.
bool deliver_load(Block& block);
void complete_bytes(Block& block, uint32_t barrier, size_t bytes, Step step);
// The address of a barrier that TMA may use.
uint32_t barrier_for_copy(const uint64_t* barrier, const char* name, Site site);
void finish_stores(Block& block);
// All threads have exited: what is wrong; empty: nothing.
std::string finish(Block& block);
std::string describe_mbarrier(const Block& block, uint32_t barrier);

}  // namespace tk::emulator
