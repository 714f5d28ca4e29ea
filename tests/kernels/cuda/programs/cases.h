// Test program with named cases. `program case seed...` prints one line for each seed: "ok", the
// failed expectation, or the error of a launch. Built by nvcc for a GPU, it ignores the seeds.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/platform/device.h"
#include "cuda/platform/element.h"

#ifndef __CUDACC__
#include <new>

#include "cuda/platform/sm80_ptx.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <map>
#endif

#ifndef __CUDACC__

// Allocator with the alignment that bulk copies need.
template <typename T>
struct Memory {
  using value_type = T;
  Memory() = default;
  template <typename Other>
  Memory(const Memory<Other>&) {}
  T* allocate(size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{128}));
  }
  void deallocate(T* data, size_t) { ::operator delete(data, std::align_val_t{128}); }
  bool operator==(const Memory&) const { return true; }
};

// Array in host memory with a device copy. Kernels use on_device(); finish() copies results back.
template <typename T>
class Array : public std::vector<T, Memory<T>> {
 public:
  using std::vector<T, Memory<T>>::vector;
  T* on_device() { return this->data(); }
};

inline void finish() {}

#else

struct Copy {
  void *device, *host;
  size_t bytes;
};

// Device copies, by array.
inline std::map<const void*, Copy>& copies() {
  static std::map<const void*, Copy> all;
  return all;
}

template <typename T>
class Array : public std::vector<T> {
 public:
  using std::vector<T>::vector;
  Array(const Array&) = default;
  ~Array() {
    if (copies().count(this)) cudaFree(copies()[this].device);
    copies().erase(this);
  }

  T* on_device() {
    const auto [at, is_new] = copies().try_emplace(this);
    Copy& copy = at->second;
    copy.host = this->data(), copy.bytes = this->size() * sizeof(T);
    if (is_new) tk::cuda::check(cudaMalloc(&copy.device, copy.bytes), "cudaMalloc");
    const auto error = cudaMemcpy(copy.device, copy.host, copy.bytes, cudaMemcpyHostToDevice);
    tk::cuda::check(error, "the copy to the device");
    return static_cast<T*>(copy.device);
  }
};

// Waits for the launch and copies all arrays back to the host.
inline void finish() {
  tk::cuda::check(cudaDeviceSynchronize(), "the kernel");
  for (const auto& [array, copy] : copies()) {
    const auto error = cudaMemcpy(copy.host, copy.device, copy.bytes, cudaMemcpyDeviceToHost);
    tk::cuda::check(error, "the copy from the device");
  }
}

#endif

// Conversions on the host.
#ifndef __CUDACC__
template <typename Element>
float value_of(Element x) {
  return tk::cuda::to_float(x);
}
template <typename Element>
Element rounded(float x) {
  return tk::cuda::to_element<Element>(x);
}
#else
inline float value_of(float x) { return x; }
inline float value_of(tk::cuda::Half x) {
  __half_raw half;
  half.x = x.bits;
  return __half2float(half);
}
inline float value_of(tk::cuda::BFloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
template <typename Element>
Element rounded(float x) {
  Element result;
  if constexpr (std::is_same_v<Element, tk::cuda::Half>) {
    result.bits = static_cast<__half_raw>(__float2half_rn(x)).x;
  } else if constexpr (std::is_same_v<Element, tk::cuda::BFloat16>) {
    result.bits = static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(x)).x;
  } else {
    result = x;
  }
  return result;
}
#endif

struct Case {
  const char* name;
  void (*run)();
};

inline void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("wrong: " + what);
}

inline void expect_equal(double value, double expected, const std::string& what) {
  expect(value == expected,
         what + " is " + std::to_string(value) + ", not " + std::to_string(expected));
}

inline void expect_near(double value, double expected, double tolerance, const std::string& what) {
  expect(std::fabs(value - expected) <= tolerance,
         what + " is " + std::to_string(value) + ", not " + std::to_string(expected));
}

// Pseudorandom numbers in [-1, 1), the same on every platform.
class Numbers {
 public:
  float next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<int32_t>(state_ >> 32)) * 0x1p-31f;
  }

 private:
  uint64_t state_ = 1;
};

inline int run_cases(int count, char** arguments, const std::vector<Case>& cases) {
  [[maybe_unused]] bool races = false;
  for (int n = 2; n < count; ++n) races |= !strcmp(arguments[n], "races");
  for (const Case& one : cases) {
    if (count < 2 || strcmp(one.name, arguments[1]) != 0) continue;
    for (int n = 2; n < count; ++n) {
      if (!strcmp(arguments[n], "races")) continue;
#ifndef __CUDACC__
      tk::emulator::settings().seed = strtoull(arguments[n], nullptr, 10);
      tk::emulator::settings().races = races;
#endif
      std::string result = "ok";
      try {
        one.run();
      } catch (const std::runtime_error& error) {
        result = error.what();
      }
      for (char& c : result) {
        if (c == '\n') c = '|';
      }
      printf("%s\n", result.c_str());
    }
    return 0;
  }
  fprintf(stderr, "no such case\n");
  return 1;
}
