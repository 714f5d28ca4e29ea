// Inline PTX of sm_90 except wgmma (sm90_wgmma.h): mbarriers, TMA, named barriers, register
// reallocation.
#pragma once

#include "cuda/platform/sm80_ptx.h"
#include "cuda/platform/sm90_tensor_map.h"

namespace tk::cuda {

// The next multiple of `alignment` from an address in shared memory on. Opaque, because the
// compiler would otherwise compute the base of shared memory anew where it is used.
TK_DEVICE unsigned char* align_shared(const void* shared, int alignment) {
  const int address = static_cast<int>(shared_address(shared));
  const int aligned = opaque(address + (-address & (alignment - 1)));
  return static_cast<unsigned char*>(__cvta_shared_to_generic(static_cast<size_t>(aligned)));
}

// ---- mbarriers. A phase completes after all expected arrivals and all expected bytes.

TK_DEVICE void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes mbarriers initialised by this thread visible to TMA.
TK_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

TK_DEVICE void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives, and adds `bytes` to the transaction count that the phase expects.
TK_DEVICE void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// True if the latest phase of this parity has completed. The first phase has parity 0; on a fresh
// mbarrier, parity 1 counts as completed.
TK_DEVICE bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(ended)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return ended != 0;
}

TK_DEVICE void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// ---- Proxy fences. Makes this thread's view of shared memory visible to TMA and wgmma.
TK_DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for global memory, in both directions.
TK_DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- Named barriers 1 to 15 of the CTA, for a multiple of 32 threads.

TK_DEVICE void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

TK_DEVICE void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- TMA copies. Shared-memory addresses are aligned to 128 bytes for tensor copies, to 16
// otherwise. Coordinates are those of the first element of the box, innermost first. Elements
// outside the tensor are read as zero, count towards the mbarrier's bytes, and are not written.

#define TK_LOAD_TENSOR(rank, coordinates, ...)                                                  \
  asm volatile("cp.async.bulk.tensor." #rank                                                    \
               "d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {" coordinates \
               "}], [%2];" ::"r"(shared_address(shared)),                                       \
               "l"(&map), "r"(shared_address(barrier)), __VA_ARGS__                             \
               : "memory")

template <int kRank>
TK_DEVICE void load_tensor(void* shared, const TensorMap& map, uint64_t* barrier,
                           const int (&at)[kRank]) {
  static_assert(kRank >= 1 && kRank <= kTensorRank);
  if constexpr (kRank == 1) {
    TK_LOAD_TENSOR(1, "%3", "r"(at[0]));
  } else if constexpr (kRank == 2) {
    TK_LOAD_TENSOR(2, "%3, %4", "r"(at[0]), "r"(at[1]));
  } else if constexpr (kRank == 3) {
    TK_LOAD_TENSOR(3, "%3, %4, %5", "r"(at[0]), "r"(at[1]), "r"(at[2]));
  } else if constexpr (kRank == 4) {
    TK_LOAD_TENSOR(4, "%3, %4, %5, %6", "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]));
  } else {
    TK_LOAD_TENSOR(5, "%3, %4, %5, %6, %7", "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]),
                   "r"(at[4]));
  }
}

#define TK_STORE_TENSOR(rank, coordinates, ...)                                                   \
  asm volatile("cp.async.bulk.tensor." #rank "d.global.shared::cta.bulk_group [%0, {" coordinates \
               "}], [%1];" ::"l"(&map),                                                           \
               "r"(shared_address(shared)), __VA_ARGS__                                           \
               : "memory")

template <int kRank>
TK_DEVICE void store_tensor(const TensorMap& map, const void* shared, const int (&at)[kRank]) {
  static_assert(kRank >= 1 && kRank <= kTensorRank);
  if constexpr (kRank == 1) {
    TK_STORE_TENSOR(1, "%2", "r"(at[0]));
  } else if constexpr (kRank == 2) {
    TK_STORE_TENSOR(2, "%2, %3", "r"(at[0]), "r"(at[1]));
  } else if constexpr (kRank == 3) {
    TK_STORE_TENSOR(3, "%2, %3, %4", "r"(at[0]), "r"(at[1]), "r"(at[2]));
  } else if constexpr (kRank == 4) {
    TK_STORE_TENSOR(4, "%2, %3, %4, %5", "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]));
  } else {
    TK_STORE_TENSOR(5, "%2, %3, %4, %5, %6", "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]),
                    "r"(at[4]));
  }
}

#undef TK_STORE_TENSOR
#undef TK_LOAD_TENSOR

// Contiguous bytes, a multiple of 16.
TK_DEVICE void load_bulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

TK_DEVICE void add_bulk(float* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(global)),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// Adds four floats at a 16-byte aligned address; atomic per float. Synchronous, unlike add_bulk.
TK_DEVICE void add_to(float* global, const float4& x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                   __cvta_generic_to_global(global)),
               "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}

TK_DEVICE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most the kPending latest groups of this thread still read shared memory.
template <int kPending>
TK_DEVICE void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until the writes of all but the kPending latest groups of this thread are complete.
template <int kPending>
TK_DEVICE void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Warps and warpgroups.

// True in exactly one lane of the warp, the same in every call. Called by all lanes.
TK_DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// Register reallocation (setmaxnreg), called by all warps of a warpgroup. request_registers waits
// until enough registers have been released.
template <int kRegisters>
TK_DEVICE void request_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
TK_DEVICE void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The inverse of load_matrices.
TK_DEVICE void store_matrices(void* shared_row, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(shared_row)),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

}  // namespace tk::cuda
