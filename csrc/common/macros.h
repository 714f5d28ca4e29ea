// Functions in shared headers are compiled once for each instruction set. They must never become
// one symbol, or the linker would keep the AVX-512 copy for every machine.
#pragma once

#ifdef __CUDACC__
#define TK_INLINE static __host__ __device__ __forceinline__
#else
#define TK_INLINE static inline __attribute__((always_inline))
#endif
#define TK_INLINE_METHOD inline __attribute__((always_inline))
#define TK_INLINE_LAMBDA __attribute__((always_inline))
