// Wrappers of sm_80 PTX instructions without a CUDA C++ intrinsic. Fragments have the layout that
// the PTX ISA defines for m16n8k16.
#pragma once

#include "cuda/platform/device.h"
#include "cuda/platform/element.h"

namespace tk::cuda {

TK_DEVICE uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Copies 16 bytes; both addresses are multiples of 16. If !valid, writes zeros and reads nothing.
TK_DEVICE void copy_async_16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
               : "memory");
}

TK_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the kPending latest commit groups of this thread are incomplete.
template <int kPending>
TK_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads four 8 x 8 matrices. Lane 8 j + r passes the address of row r of matrix j, 16-byte aligned.
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

// Rounds to nearest even and packs two values; `low` is in the lower 16 bits.
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

// 2^x with an error of about 2 ulp; results below 2^-126 are flushed to 0.
TK_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger one, or NaN if one is NaN.
TK_DEVICE float max_or_nan(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}

// Returns x, hidden from the optimizer. Values computed from it are not hoisted out of a loop,
// where they would occupy registers.
TK_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
TK_DEVICE uint64_t opaque(uint64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

// Atomic addition without a return value.
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
