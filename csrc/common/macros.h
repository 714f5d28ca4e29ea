// Inlining macros. Functions in shared headers are compiled once per instruction set and must not
// have external linkage: the linker would merge the copies and could keep the AVX-512 one for every
// CPU.
#pragma once

#ifdef __CUDACC__
#define TK_INLINE static __host__ __device__ __forceinline__
#else
#define TK_INLINE static inline __attribute__((always_inline))
#endif
#define TK_INLINE_METHOD inline __attribute__((always_inline))
#define TK_INLINE_LAMBDA __attribute__((always_inline))
