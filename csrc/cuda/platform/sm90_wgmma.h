// wgmma: asynchronous c (64 x N) += a (64 x 16) b (16 x N) by the four warps of a warpgroup.
//
//   wgmma_fence();        // before the first wgmma, and after any access to its registers
//   for (k steps) wgmma<Major::kK, Major::kK>(c, a, b, Half{}, k > 0);
//   wgmma_commit();
//   wgmma_wait<0>();      // until then: no access to c or a in registers, no write to shared a, b
//
// c[i] of a thread is row 16 (warp % 4) + lane / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (lane % 4)
// + i % 2; a in registers is laid out as for mma.m16n8k16.
#pragma once

#include "cuda/platform/major.h"
#include "cuda/platform/matrix_descriptor.h"
#include "cuda/platform/sm90_ptx.h"

namespace tk::cuda {

TK_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

TK_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
TK_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Compiler barrier: accesses to c are not moved across it.
template <int kCount>
TK_DEVICE void wgmma_hold(float (&c)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

namespace wgmma_detail {

// Operand names %0 to %9, with a leading digit.
#define TK_TEN(tens)                                                                      \
  "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens \
  "6, %" #tens "7, %" #tens "8, %" #tens "9, "
#define TK_C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define TK_C16(i) TK_C4(i), TK_C4(i + 4), TK_C4(i + 8), TK_C4(i + 12)
#define TK_C64(i) TK_C16(i), TK_C16(i + 16), TK_C16(i + 32), TK_C16(i + 48)

#define TK_OUTPUTS_32 TK_C16(0)
#define TK_OUTPUTS_64 TK_C16(0), TK_C16(16)
#define TK_OUTPUTS_96 TK_C16(0), TK_C16(16), TK_C16(32)
#define TK_OUTPUTS_128 TK_C64(0)
#define TK_OUTPUTS_192 TK_C64(0), TK_C16(64), TK_C16(80)
#define TK_OUTPUTS_256 TK_C64(0), TK_C64(64)

#define TK_TO_10 TK_TEN()
#define TK_TO_30 TK_TO_10 TK_TEN(1) TK_TEN(2)
#define TK_TO_40 TK_TO_30 TK_TEN(3)
#define TK_TO_60 TK_TO_40 TK_TEN(4) TK_TEN(5)
#define TK_TO_90 TK_TO_60 TK_TEN(6) TK_TEN(7) TK_TEN(8)
#define TK_TO_120 TK_TO_90 TK_TEN(9) TK_TEN(10) TK_TEN(11)

#define TK_NAMES_32 TK_TO_10 "%10, %11, %12, %13, %14, %15"
#define TK_NAMES_64 TK_TO_30 "%30, %31"
#define TK_NAMES_96 TK_TO_40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define TK_NAMES_128 TK_TO_60 "%60, %61, %62, %63"
#define TK_NAMES_192 TK_TO_90 "%90, %91, %92, %93, %94, %95"
#define TK_NAMES_256 TK_TO_120 "%120, %121, %122, %123, %124, %125, %126, %127"

// n0 to n6 are the indices of the operands after c.
#define TK_WGMMA(n, Element, type, n0, n1, n2, n3, n4, n5, n6)                                   \
  template <Major kA, Major kB>                                                                  \
  TK_DEVICE void multiply(float (&c)[n / 2], uint64_t a, uint64_t b, Element, bool accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #n2                                        \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type           \
                 " {" TK_NAMES_##n "}, %" #n0 ", %" #n1 ", p, 1, 1, %" #n3 ", %" #n4 ";\n}"      \
                 : TK_OUTPUTS_##n                                                                \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kA)), \
                   "n"(static_cast<int>(kB)));                                                   \
  }                                                                                              \
  template <Major kB>                                                                            \
  TK_DEVICE void multiply(float (&c)[n / 2], const uint32_t (&a)[4], uint64_t b, Element,        \
                          bool accumulate) {                                                     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #n5                                        \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type           \
                 " {" TK_NAMES_##n "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4          \
                                   ", p, 1, 1, %" #n6 ";\n}"                                     \
                 : TK_OUTPUTS_##n                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                           \
                   "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kB)));                \
  }
#define TK_WGMMA_BOTH(n, ...)           \
  TK_WGMMA(n, Half, "f16", __VA_ARGS__) \
  TK_WGMMA(n, BFloat16, "bf16", __VA_ARGS__)

TK_WGMMA_BOTH(32, 16, 17, 18, 19, 20, 21, 22)
TK_WGMMA_BOTH(64, 32, 33, 34, 35, 36, 37, 38)
TK_WGMMA_BOTH(96, 48, 49, 50, 51, 52, 53, 54)
TK_WGMMA_BOTH(128, 64, 65, 66, 67, 68, 69, 70)
TK_WGMMA_BOTH(192, 96, 97, 98, 99, 100, 101, 102)
TK_WGMMA_BOTH(256, 128, 129, 130, 131, 132, 133, 134)

#undef TK_WGMMA_BOTH
#undef TK_WGMMA
#undef TK_NAMES_256
#undef TK_NAMES_192
#undef TK_NAMES_128
#undef TK_NAMES_96
#undef TK_NAMES_64
#undef TK_NAMES_32
#undef TK_TO_120
#undef TK_TO_90
#undef TK_TO_60
#undef TK_TO_40
#undef TK_TO_30
#undef TK_TO_10
#undef TK_OUTPUTS_256
#undef TK_OUTPUTS_192
#undef TK_OUTPUTS_128
#undef TK_OUTPUTS_96
#undef TK_OUTPUTS_64
#undef TK_OUTPUTS_32
#undef TK_C64
#undef TK_C16
#undef TK_C4
#undef TK_TEN

}  // namespace wgmma_detail

// N is 2 kCount: 32, 64, 96, 128, 192 or 256. Without `accumulate`, c is overwritten. Element is
// Half or BFloat16.
template <Major kA, Major kB, typename Element, int kCount>
TK_DEVICE void wgmma(float (&c)[kCount], uint64_t a, uint64_t b, Element element, bool accumulate) {
  wgmma_detail::multiply<kA, kB>(c, a, b, element, accumulate);
}

template <Major kB, typename Element, int kCount>
TK_DEVICE void wgmma(float (&c)[kCount], const uint32_t (&a)[4], uint64_t b, Element element,
                     bool accumulate) {
  wgmma_detail::multiply<kB>(c, a, b, element, accumulate);
}

}  // namespace tk::cuda
