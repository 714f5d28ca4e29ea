// The functions of csrc/cuda/platform/sm90_wgmma.h, emulated.
#pragma once

#include <type_traits>

#include "cuda/platform/major.h"
#include "cuda/platform/matrix_descriptor.h"
#include "cuda/platform/sm90_ptx.h"

namespace tk::emulator {

// Operands of one lane of a product.
struct ProductIssue {
  float* c;
  int count;
  const uint32_t* a_registers;  // null if a is a descriptor
  uint64_t a, b;
  bool a_mn_major, b_mn_major, bfloat16, accumulate;
  Site site;
};
void issue_product(const ProductIssue& issue);

}  // namespace tk::emulator

namespace tk::cuda {

void wgmma_fence(Site site = Site::here());
void wgmma_commit(Site site = Site::here());
void wgmma_wait_for(int pending, Site site);

template <int kPending>
TK_DEVICE void wgmma_wait(Site site = Site::here()) {
  wgmma_wait_for(kPending, site);
}

template <int kCount>
TK_DEVICE void wgmma_hold(float (&)[kCount]) {}

template <typename Element, int kCount>
constexpr bool kWgmmaExists =
    (std::is_same_v<Element, Half> || std::is_same_v<Element, BFloat16>) &&
    (kCount == 16 || kCount == 32 || kCount == 48 || kCount == 64 || kCount == 96 || kCount == 128);

template <Major kA, Major kB, typename Element, int kCount>
TK_DEVICE void wgmma(float (&c)[kCount], uint64_t a, uint64_t b, Element, bool accumulate,
                     Site site = Site::here()) {
  static_assert(kWgmmaExists<Element, kCount>);
  emulator::issue_product({c, kCount, nullptr, a, b, kA == Major::kMN, kB == Major::kMN,
                           std::is_same_v<Element, BFloat16>, accumulate, site});
}

template <Major kB, typename Element, int kCount>
TK_DEVICE void wgmma(float (&c)[kCount], const uint32_t (&a)[4], uint64_t b, Element,
                     bool accumulate, Site site = Site::here()) {
  static_assert(kWgmmaExists<Element, kCount>);
  emulator::issue_product({c, kCount, a, 0, b, false, kB == Major::kMN,
                           std::is_same_v<Element, BFloat16>, accumulate, site});
}

}  // namespace tk::cuda
