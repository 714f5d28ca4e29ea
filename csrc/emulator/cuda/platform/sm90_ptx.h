// The functions of csrc/cuda/platform/sm90_ptx.h, emulated.
#pragma once

#include "cuda/platform/sm80_ptx.h"
#include "cuda/platform/sm90_tensor_map.h"
#include "emulator/core.h"

namespace tk::cuda {

TK_DEVICE unsigned char* align_shared(unsigned char* shared, int alignment) {
  return shared + (-static_cast<int>(shared_address(shared)) & (alignment - 1));
}

void mbarrier_init(uint64_t* barrier, uint32_t arrivals, Site site = Site::here());
void fence_mbarrier_init();
void mbarrier_arrive(uint64_t* barrier, Site site = Site::here());
void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes, Site site = Site::here());
bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity, Site site = Site::here());
void mbarrier_wait(uint64_t* barrier, uint32_t parity, Site site = Site::here());

void fence_async();
TK_DEVICE void fence_async_global() {}  // global memory has no async-proxy copy here

TK_DEVICE void named_barrier_sync(int barrier, int threads, Site site = Site::here()) {
  emulator::barrier_wait(barrier, static_cast<unsigned>(threads), "bar.sync", site);
}

TK_DEVICE void named_barrier_arrive(int barrier, int threads, Site site = Site::here()) {
  emulator::barrier_arrive(barrier, static_cast<unsigned>(threads), "bar.arrive", site);
}

void load_tensor(void* shared, const TensorMap& map, uint64_t* barrier, const int* at, int rank,
                 Site site);
void store_tensor(const TensorMap& map, const void* shared, const int* at, int rank, Site site);

template <int kRank>
TK_DEVICE void load_tensor(void* shared, const TensorMap& map, uint64_t* barrier,
                           const int (&at)[kRank], Site site = Site::here()) {
  load_tensor(shared, map, barrier, at, kRank, site);
}

template <int kRank>
TK_DEVICE void store_tensor(const TensorMap& map, const void* shared, const int (&at)[kRank],
                            Site site = Site::here()) {
  store_tensor(map, shared, at, kRank, site);
}

void load_bulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
               Site site = Site::here());
void add_bulk(float* global, const void* shared, uint32_t bytes, Site site = Site::here());

TK_DEVICE void add_to(float* global, const float4& x, Site site = Site::here()) {
  const float numbers[] = {x.x, x.y, x.z, x.w};
  for (int n = 0; n < 4; ++n) add_to(global + n, numbers[n], site);
}

void commit_stores();
void wait_stores(int pending, bool only_read, Site site);

template <int kPending>
TK_DEVICE void wait_stores_read(Site site = Site::here()) {
  wait_stores(kPending, true, site);
}

template <int kPending>
TK_DEVICE void wait_stores(Site site = Site::here()) {
  wait_stores(kPending, false, site);
}

bool elect_one(Site site = Site::here());
void set_registers(int count, bool increase, Site site);

template <int kRegisters>
TK_DEVICE void request_registers(Site site = Site::here()) {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  set_registers(kRegisters, true, site);
}

template <int kRegisters>
TK_DEVICE void release_registers(Site site = Site::here()) {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  set_registers(kRegisters, false, site);
}

void store_matrices(void* shared_row, const uint32_t (&x)[4], Site site = Site::here());

}  // namespace tk::cuda
