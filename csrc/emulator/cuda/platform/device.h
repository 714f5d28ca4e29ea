// CUDA built-ins for kernels compiled by the host compiler. Only those that kernels use.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>

#include "emulator/core.h"

#define TK_DEVICE static inline __attribute__((unused))
#define TK_DEVICE_METHOD inline
#define TK_KERNEL(threads, blocks_per_multiprocessor) void
#define TK_SHARED_MEMORY(name) unsigned char* const name = ::tk::emulator::shared_memory()
#define TK_LAUNCH(kernel, grid, threads, shared_bytes, stream, ...) \
  ::tk::emulator::launch(#kernel, kernel, grid, threads, shared_bytes, stream, __VA_ARGS__)
#define TK_LOADED_ARCH(kernel) __CUDA_ARCH__  // defined by the build

#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

TK_DEVICE float2 make_float2(float x, float y) { return {x, y}; }
TK_DEVICE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
TK_DEVICE int2 make_int2(int x, int y) { return {x, y}; }
TK_DEVICE int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
TK_DEVICE uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
TK_DEVICE uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace tk::emulator {

// Operand of one lane of a shuffle or a vote.
struct Exchange {
  uint64_t value;
  int source;  // lane to read from
  Site site;
};
extern const Collective kShuffle, kBallot, kSyncWarp;

template <typename T>
T shuffle(unsigned lanes, T value, int source, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  Exchange exchange{0, source, site};
  memcpy(&exchange.value, &value, sizeof value);
  warp_collective(kShuffle, lanes, &exchange, site);
  memcpy(&value, &exchange.value, sizeof value);
  return value;
}

inline unsigned ballot(unsigned lanes, bool predicate, Site site) {
  Exchange exchange{predicate, 0, site};
  warp_collective(kBallot, lanes, &exchange, site);
  return static_cast<unsigned>(exchange.value);
}

template <typename... Parameters, typename... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, unsigned threads,
            size_t shared_bytes, void* /*stream*/, Arguments&&... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
  } call{kernel, {static_cast<Arguments&&>(arguments)...}};
  launch({name,
          {grid.x, grid.y, grid.z},
          threads,
          shared_bytes,
          [](const void* opaque) {
            const Call& call = *static_cast<const Call*>(opaque);
            std::apply(call.kernel, call.arguments);
          },
          &call,
          sizeof call});
}

}  // namespace tk::emulator

// Not fused with an addition of its result: the volatile variable keeps the compiler from it.
TK_DEVICE float __fmul_rn(float a, float b) {
  volatile float product = a * b;
  return product;
}

namespace tk::cuda {

inline void set_device(int) {}

struct Multiprocessors {
  int count, shared_bytes;
};

// A small odd count, so that persistent kernels split work unevenly. One block fits on each.
inline Multiprocessors multiprocessors() { return {7, 0}; }

inline int compute_capability() { return emulator::settings().capability; }

inline int aimed_ctas(int count) {
  return emulator::settings().aimed_ctas ? emulator::settings().aimed_ctas : count;
}

}  // namespace tk::cuda

TK_DEVICE void __syncthreads(tk::emulator::Site site = tk::emulator::Site::here()) {
  tk::emulator::barrier_wait(0, blockDim.x, "__syncthreads", site);
}

TK_DEVICE void __syncwarp(unsigned lanes = tk::emulator::kAllLanes,
                          tk::emulator::Site site = tk::emulator::Site::here()) {
  tk::emulator::warp_collective(tk::emulator::kSyncWarp, lanes, nullptr, site);
}

template <typename T>
TK_DEVICE T __shfl_sync(unsigned lanes, T value, int source, int width = 32,
                        tk::emulator::Site site = tk::emulator::Site::here()) {
  const int lane = tk::emulator::this_lane();
  return tk::emulator::shuffle(lanes, value, (lane & -width) | (source & (width - 1)), site);
}

template <typename T>
TK_DEVICE T __shfl_xor_sync(unsigned lanes, T value, int flip, int width = 32,
                            tk::emulator::Site site = tk::emulator::Site::here()) {
  const int lane = tk::emulator::this_lane(), source = lane ^ flip;
  return tk::emulator::shuffle(lanes, value, (source & -width) > lane ? lane : source, site);
}

template <typename T>
TK_DEVICE T __shfl_up_sync(unsigned lanes, T value, unsigned delta, int width = 32,
                           tk::emulator::Site site = tk::emulator::Site::here()) {
  const int lane = tk::emulator::this_lane(), source = lane - static_cast<int>(delta);
  return tk::emulator::shuffle(lanes, value, source < (lane & -width) ? lane : source, site);
}

template <typename T>
TK_DEVICE T __shfl_down_sync(unsigned lanes, T value, unsigned delta, int width = 32,
                             tk::emulator::Site site = tk::emulator::Site::here()) {
  const int lane = tk::emulator::this_lane(), source = lane + static_cast<int>(delta);
  return tk::emulator::shuffle(lanes, value, source > (lane | (width - 1)) ? lane : source, site);
}

TK_DEVICE unsigned __ballot_sync(unsigned lanes, int predicate,
                                 tk::emulator::Site site = tk::emulator::Site::here()) {
  return tk::emulator::ballot(lanes, predicate != 0, site);
}

TK_DEVICE int __any_sync(unsigned lanes, int predicate,
                         tk::emulator::Site site = tk::emulator::Site::here()) {
  return tk::emulator::ballot(lanes, predicate != 0, site) != 0;
}

TK_DEVICE int __all_sync(unsigned lanes, int predicate,
                         tk::emulator::Site site = tk::emulator::Site::here()) {
  return tk::emulator::ballot(lanes, predicate != 0, site) == lanes;
}

namespace tk::emulator {

// Read-modify-write. It is atomic because a fiber runs until it yields. Not inline: the race
// detector must not instrument these accesses as plain ones.
float atomic_update(float* address, float (*operation)(float, float), float value, Site site);
int atomic_update(int* address, int (*operation)(int, int), int value, Site site);
unsigned atomic_update(unsigned* address, unsigned (*operation)(unsigned, unsigned), unsigned value,
                       Site site);
unsigned long long atomic_update(unsigned long long* address,
                                 unsigned long long (*operation)(unsigned long long,
                                                                 unsigned long long),
                                 unsigned long long value, Site site);

}  // namespace tk::emulator

template <typename T>
TK_DEVICE T atomicAdd(T* address, T value, tk::emulator::Site site = tk::emulator::Site::here()) {
  return tk::emulator::atomic_update(address, [](T old, T x) -> T { return old + x; }, value, site);
}

template <typename T>
TK_DEVICE T atomicMax(T* address, T value, tk::emulator::Site site = tk::emulator::Site::here()) {
  return tk::emulator::atomic_update(
      address, [](T old, T x) -> T { return old < x ? x : old; }, value, site);
}

template <typename T>
TK_DEVICE T atomicMin(T* address, T value, tk::emulator::Site site = tk::emulator::Site::here()) {
  return tk::emulator::atomic_update(
      address, [](T old, T x) -> T { return x < old ? x : old; }, value, site);
}

template <typename T>
TK_DEVICE T atomicOr(T* address, T value, tk::emulator::Site site = tk::emulator::Site::here()) {
  return tk::emulator::atomic_update(address, [](T old, T x) -> T { return old | x; }, value, site);
}

template <typename T>
TK_DEVICE T atomicExch(T* address, T value, tk::emulator::Site site = tk::emulator::Site::here()) {
  return tk::emulator::atomic_update(address, [](T, T x) -> T { return x; }, value, site);
}

TK_DEVICE void __threadfence() { tk::emulator::fence(); }
TK_DEVICE void __threadfence_block() { tk::emulator::fence(); }

TK_DEVICE void __trap(tk::emulator::Site site = tk::emulator::Site::here()) {
  tk::emulator::fail(site, "__trap");
}

template <typename T>
TK_DEVICE T __ldg(const T* address) {
  return *address;
}

TK_DEVICE unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
TK_DEVICE int __popc(unsigned x) { return __builtin_popcount(x); }
TK_DEVICE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
TK_DEVICE int __ffs(int x) { return __builtin_ffs(x); }
TK_DEVICE int __ffsll(long long x) { return __builtin_ffsll(x); }
TK_DEVICE int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
TK_DEVICE int __clzll(long long x) {
  return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64;
}

TK_DEVICE unsigned __float_as_uint(float x) {
  unsigned bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
TK_DEVICE float __uint_as_float(unsigned bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
TK_DEVICE int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
TK_DEVICE float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }

TK_DEVICE float __fdividef(float a, float b) { return a / b; }
TK_DEVICE float tk_reciprocal_root(float x) { return 1 / sqrtf(x); }
// Macros, because C libraries define symbols with these names.
#define rsqrtf tk_reciprocal_root
#define __expf expf
#define __logf logf

// CUDA's unqualified min and max, also for mixed types.
template <typename A, typename B>
TK_DEVICE auto min(A a, B b) -> decltype(a + b) {
  return b < a ? b : a;
}
template <typename A, typename B>
TK_DEVICE auto max(A a, B b) -> decltype(a + b) {
  return a < b ? b : a;
}
TK_DEVICE float min(float a, float b) { return fminf(a, b); }
TK_DEVICE float max(float a, float b) { return fmaxf(a, b); }

using std::isfinite;
using std::isinf;
using std::isnan;
