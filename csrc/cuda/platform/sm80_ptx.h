// Every instruction of sm_80 that has no name in CUDA C++. Fragments are laid out as the PTX manual
// shows for m16n8k16. The emulator has a function of the same name for each.
#pragma once

#include "cuda/platform/device.h"
#include "cuda/platform/element.h"

#ifdef TK_EMULATOR

#include "cuda/emulator/sm80_ptx.h"

#else

namespace tk::cuda {

TK_DEVICE uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Both addresses are multiples of 16. !there: zeros, and global is not read.
TK_DEVICE void copy_async_16(void* shared, const void* global, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(there ? 16 : 0)
               : "memory");
}

TK_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the kPending latest commits of this thread are under way.
template <int kPending>
TK_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Lane 8 j + r gives the address of row r of matrix j: 16 bytes, a multiple of 16.
TK_DEVICE void load_matrices(uint32_t (&x)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

TK_DEVICE void load_matrices_transposed(uint32_t (&x)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

// c (16 x 8) += a (16 x 16) b (16 x 8).
TK_DEVICE void multiply_accumulate(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                   Half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

TK_DEVICE void multiply_accumulate(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                   BFloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounded to nearest even; low goes to the lower 16 bits.
TK_DEVICE uint32_t pack(float low, float high, Half) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

TK_DEVICE uint32_t pack(float low, float high, BFloat16) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

TK_DEVICE float to_float(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

TK_DEVICE float to_float(BFloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

TK_DEVICE float to_float(float x) { return x; }

// Rounds to nearest even.
template <typename Element>
TK_DEVICE Element to_element(float x);

template <>
__device__ __forceinline__ Half to_element<Half>(float x) {
  Half y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

template <>
__device__ __forceinline__ BFloat16 to_element<BFloat16>(float x) {
  BFloat16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

template <>
__device__ __forceinline__ float to_element<float>(float x) {
  return x;
}

// 2^x to about 2 units in the last place; what is smaller than 2^-126 is 0.
TK_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x, of which the compiler knows nothing: what is computed from it is not taken out of a loop, to
// be kept in registers.
TK_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
TK_DEVICE uint64_t opaque(uint64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

TK_DEVICE void add_to(float* global, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(global)),
               "f"(value)
               : "memory");
}

TK_DEVICE int load_acquire(const int* global) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(global))
               : "memory");
  return value;
}

TK_DEVICE void add_release(int* global, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(global)),
               "r"(value)
               : "memory");
}

}  // namespace tk::cuda

#endif
