// Test program with named cases. `program CASE [races] SEED...` prints a line for each seed: "ok",
// or the case with the failed expectation or error of a launch. CASE is the name of a case, "all",
// or "case:defect". Built by nvcc for a GPU, the program ignores seeds and defects.
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
#include "cuda/platform/sm80_ptx.h"
#include "cuda/platform/tensor_box.h"

#ifndef __CUDACC__
#include <new>
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

inline std::vector<Case> cases;

struct Registered {
  Registered(const char* name, void (*run)()) { cases.push_back({name, run}); }
};

// Defines a case: TK_CASE(name) { ... }
#define TK_CASE(name)                           \
  void name();                                  \
  const Registered name##_is_case{#name, name}; \
  void name()

// Defines a case by its kernel body. A program has Params, Thread and launch<body>.
#define TK_BODY(name)                                   \
  TK_DEVICE void name(const Params&, const Thread&);    \
  const Registered name##_is_case{#name, launch<name>}; \
  TK_DEVICE void name([[maybe_unused]] const Params& p, [[maybe_unused]] const Thread& t)

inline std::string defect;

// True if the program runs with the defect of this name. nvcc compiles the correct kernel only.
inline __host__ __device__ bool has_defect([[maybe_unused]] const char* name) {
#ifndef __CUDACC__
  return !strcmp(defect.c_str(), name);
#else
  return false;
#endif
}

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

template <typename Range>
void fill(Range& elements, Numbers& numbers) {
  for (auto& x : elements) x = rounded<std::remove_reference_t<decltype(x)>>(numbers.next());
}

// Dot product of two rows of K elements.
template <typename Element>
double dot(const Element* a, const Element* b, size_t K) {
  double sum = 0;
  for (size_t k = 0; k < K; ++k) sum += double(value_of(a[k])) * value_of(b[k]);
  return sum;
}

TK_DEVICE unsigned char* align_to(unsigned char* shared, uint32_t alignment) {
  return shared + (-tk::cuda::shared_address(shared) & (alignment - 1));
}

// Byte offset of 16-byte chunk c of row r. PTX manual, swizzling modes.
inline int swizzled(tk::cuda::Swizzle mode, int r, int c) {
  switch (mode) {
    case tk::cuda::Swizzle::k128:
      return r * 128 + (c ^ r % 8) * 16;
    case tk::cuda::Swizzle::k64:
      return r * 64 + (c ^ r / 2 % 4) * 16;
    case tk::cuda::Swizzle::k32:
      return r * 32 + (c ^ r / 4 % 2) * 16;
    default:
      return r * 16 + c * 16;
  }
}

inline int row_chunks(tk::cuda::Swizzle mode) {
  return mode == tk::cuda::Swizzle::k128  ? 8
         : mode == tk::cuda::Swizzle::k64 ? 4
         : mode == tk::cuda::Swizzle::k32 ? 2
                                          : 1;
}

inline std::string run_cases(const std::string& name) {
  bool found = false;
  for (const Case& one : cases) {
    if (name != "all" && name != one.name) continue;
    found = true;
    try {
      one.run();
    } catch (const std::runtime_error& error) {
      std::string what = error.what();
      for (char& c : what) c = c == '\n' ? '|' : c;
      return one.name + (": " + what);
    }
  }
  return found ? "ok" : "no such case";
}

int main(int count, char** arguments) {
  const std::string given = count < 2 ? "" : arguments[1];
  const size_t colon = given.find(':');
  if (colon != std::string::npos) defect = given.substr(colon + 1);
  for (int n = 2; n < count; ++n) {
#ifndef __CUDACC__
    if (!strcmp(arguments[n], "races")) {
      tk::emulator::settings().races = true;
      continue;
    }
    tk::emulator::settings().seed = strtoull(arguments[n], nullptr, 10);
#endif
    printf("%s\n", run_cases(given.substr(0, colon)).c_str());
  }
}
