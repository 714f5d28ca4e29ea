// What a kernel is written with, for nvcc and for the emulator (docs/emulator.md) alike:
//
//   template <typename Element, int kWidth>
//   TK_KERNEL(128, 2) forward_kernel(const __grid_constant__ Params p) {
//     TK_SHARED_MEMORY(shared);
//     ...
//   }
//   constexpr auto kernel = &forward_kernel<Element, kWidth>;
//   TK_LAUNCH(kernel, dim3(M_blocks, B * H_q), 128, shared_bytes, stream, params);
//
// TK_LAUNCH throws std::runtime_error.
#pragma once

#ifdef TK_EMULATOR

#include "emulator/device.h"

#else

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#define TK_DEVICE static __device__ __forceinline__
#define TK_DEVICE_METHOD __device__ __forceinline__

#define TK_KERNEL(threads, blocks_per_multiprocessor) \
  __global__ void __launch_bounds__(threads, blocks_per_multiprocessor)

// Bytes, aligned to 128.
#define TK_SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]

#define TK_LAUNCH(kernel, grid, threads, shared_bytes, stream, ...) \
  ::tk::cuda::launch(#kernel, kernel, grid, threads, shared_bytes, stream, __VA_ARGS__)

namespace tk::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

// The current device's.
struct Multiprocessors {
  int count;
  int shared_bytes;  // of each
};

inline Multiprocessors multiprocessors() {
  int device;
  Multiprocessors all;
  check(cudaGetDevice(&device), "the current device");
  check(cudaDeviceGetAttribute(&all.count, cudaDevAttrMultiProcessorCount, device),
        "the number of multiprocessors");
  check(cudaDeviceGetAttribute(&all.shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                               device),
        "shared memory of a multiprocessor");
  return all;
}

// Of the current device: 90 for 9.0.
inline int compute_capability() {
  int device, major, minor;
  check(cudaGetDevice(&device), "the current device");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "its chip");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "its chip");
  return 10 * major + minor;
}

template <typename... Parameters, typename... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, unsigned threads,
            size_t shared_bytes, void* stream, Arguments&&... arguments) {
  constexpr size_t kWithoutAsking = 48 * 1024;
  if (shared_bytes > kWithoutAsking) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes)),
          name);
  }
  kernel<<<grid, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(
      static_cast<Arguments&&>(arguments)...);
  check(cudaGetLastError(), name);
}

}  // namespace tk::cuda

#endif
