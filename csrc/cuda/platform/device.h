// Macros and host functions for kernels:
//
//   template <typename Element, int kWidth>
//   TK_KERNEL(128, 2) forward_kernel(const __grid_constant__ Params p) {
//     TK_SHARED_MEMORY(shared);
//     ...
//   }
//   constexpr auto kernel = &forward_kernel<Element, kWidth>;
//   TK_LAUNCH(kernel, dim3(M_blocks, B * H_q), 128, shared_bytes, stream, params);
//
// TK_LAUNCH throws std::runtime_error for CUDA errors.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#define TK_DEVICE static __device__ __forceinline__
#define TK_DEVICE_METHOD __device__ __forceinline__

#define TK_KERNEL(threads, blocks_per_multiprocessor) \
  __global__ void __launch_bounds__(threads, blocks_per_multiprocessor)

// Dynamic shared memory as bytes, aligned to 128.
#define TK_SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]

#define TK_LAUNCH(kernel, grid, threads, shared_bytes, stream, ...) \
  ::tk::cuda::launch(#kernel, kernel, grid, threads, shared_bytes, stream, __VA_ARGS__)

// 10 times the compute capability that the loaded code of a kernel was compiled for, e.g. 800.
#define TK_LOADED_ARCH(kernel) ::tk::cuda::loaded_arch(#kernel, kernel)

namespace tk::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    static_cast<void>(
        cudaGetLastError());  // clears the error, so that the next launch does not report it
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

inline void set_device(int device) { check(cudaSetDevice(device), "cudaSetDevice"); }

// Multiprocessors of a device.
struct Multiprocessors {
  int count;
  int shared_bytes;  // shared memory of one multiprocessor
};

struct DeviceProperties {
  Multiprocessors multiprocessors;
  int compute_capability;  // 90 for 9.0
};

// Of the current device. The driver is asked once for each: every launch needs them.
inline DeviceProperties device_properties() {
  static std::mutex mutex;
  static std::map<int, DeviceProperties> known;
  int device;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = known.find(device); found != known.end()) return found->second;
  const auto attribute = [device](cudaDeviceAttr name) {
    int value;
    check(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
    return value;
  };
  const DeviceProperties properties = {{attribute(cudaDevAttrMultiProcessorCount),
                                        attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor)},
                                       10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                                           attribute(cudaDevAttrComputeCapabilityMinor)};
  return known[device] = properties;
}

inline Multiprocessors multiprocessors() { return device_properties().multiprocessors; }
inline int compute_capability() { return device_properties().compute_capability; }

template <typename... Parameters>
int loaded_arch(const char* name, void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), name);
  return attributes.ptxVersion * 10;
}

// Number of CTAs that a launch aims at if it would choose `count`.
inline int aimed_ctas(int count) { return count; }

// Raises the shared-memory limit of a kernel on the current device to `bytes`. The limit is never
// lowered: another thread may be about to launch the same kernel with more.
inline void allow_shared_bytes(const char* name, const void* kernel, size_t bytes) {
  constexpr size_t kDefaultLimit = 48 * 1024;
  if (bytes <= kDefaultLimit) return;
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, size_t> allowed;
  int device;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex);
  size_t& limit = allowed[{device, kernel}];
  if (bytes <= limit) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        name);
  limit = bytes;
}

template <typename... Parameters, typename... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, unsigned threads,
            size_t shared_bytes, void* stream, Arguments&&... arguments) {
  allow_shared_bytes(name, reinterpret_cast<const void*>(kernel), shared_bytes);
  kernel<<<grid, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(
      static_cast<Arguments&&>(arguments)...);
  check(cudaGetLastError(), name);
}

}  // namespace tk::cuda
