// The functions of csrc/cuda/platform/sm80_ptx.h, emulated.
#pragma once

#include "cuda/platform/device.h"
#include "cuda/platform/element.h"
#include "emulator/core.h"

namespace tk::cuda {

using emulator::Site;

TK_DEVICE uint32_t shared_address(const void* shared) { return emulator::shared_address(shared); }

TK_DEVICE void copy_async_16(void* shared, const void* global, bool valid,
                             Site site = Site::here()) {
  emulator::copy_async(shared, global, valid, site);
}

TK_DEVICE void commit_copies() { emulator::commit_copies(); }

template <int kPending>
TK_DEVICE void wait_copies() {
  emulator::wait_copies(kPending);
}

void load_matrices(uint32_t (&x)[4], const void* shared_row, Site site = Site::here());
void load_matrices_transposed(uint32_t (&x)[4], const void* shared_row, Site site = Site::here());
void multiply_accumulate(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Half,
                         Site site = Site::here());
void multiply_accumulate(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, BFloat16,
                         Site site = Site::here());

// By reference: compilers do not instrument the copy of an argument, and the race detector would
// miss the read.
TK_DEVICE float to_float(const BFloat16& x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}

// After the shift the exponent is 112 too small, for subnormal numbers too.
TK_DEVICE float to_float(const Half& x) {
  const unsigned magnitude = x.bits & 0x7fffu, sign = (x.bits & 0x8000u) << 16;
  const float finite = __uint_as_float(magnitude << 13) * 0x1p112f;
  const unsigned bits =
      magnitude >= 0x7c00 ? 0x7f800000u | (magnitude & 0x3ffu) << 13 : __float_as_uint(finite);
  return __uint_as_float(sign | bits);
}

TK_DEVICE float to_float(float x) { return x; }

template <typename Element>
Element to_element(float x);

template <>
inline float to_element<float>(float x) {
  return x;
}

template <>
inline BFloat16 to_element<BFloat16>(float x) {
  const unsigned bits = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <>
inline Half to_element<Half>(float x) {
  const unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u;
  const unsigned magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7fff};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and above
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 1/2 rounds to a multiple of 2^-24
    const unsigned rounded = __float_as_uint(__uint_as_float(magnitude) + 0.5f);
    return {static_cast<uint16_t>(sign | (rounded - 0x3f000000u))};
  }
  const unsigned rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return {static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13)};
}

TK_DEVICE uint32_t pack(float low, float high, Half) {
  return to_element<Half>(low).bits | static_cast<uint32_t>(to_element<Half>(high).bits) << 16;
}

TK_DEVICE uint32_t pack(float low, float high, BFloat16) {
  return to_element<BFloat16>(low).bits | static_cast<uint32_t>(to_element<BFloat16>(high).bits)
                                              << 16;
}

TK_DEVICE float exp2_approx(float x) { return x < -126 ? 0 : exp2f(x); }

TK_DEVICE float max_or_nan(float x, float y) { return isnan(x) ? x : isnan(y) ? y : fmaxf(x, y); }

TK_DEVICE int opaque(int x) { return x; }
TK_DEVICE uint64_t opaque(uint64_t x) { return x; }

TK_DEVICE void add_to(float* global, float value, Site site = Site::here()) {
  atomicAdd(global, value, site);
}

TK_DEVICE int load_acquire(const int* global, Site site = Site::here()) {
  return emulator::load_acquire(global, site);
}

TK_DEVICE void add_release(int* global, int value, Site site = Site::here()) {
  emulator::add_release(global, value, site);
}

}  // namespace tk::cuda
