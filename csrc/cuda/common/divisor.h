// Division by a number that the host knows, by a multiplication and a shift: a few instructions,
// where a GPU has none for integer division.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda/platform/device.h"

namespace tk::cuda {

class Divisor {
 public:
  Divisor() : Divisor(1) {}
  explicit Divisor(int64_t divisor)  // 1 <= divisor < 2^31
      : divisor_(static_cast<uint32_t>(divisor)),
        shift_(31 + static_cast<uint32_t>(std::bit_width(divisor_ - 1))),
        factor_(static_cast<uint32_t>(((uint64_t{1} << shift_) + divisor_ - 1) / divisor_)) {}

  struct Result {
    int quotient, remainder;
  };

  // x >= 0. The factor exceeds 2^shift / divisor by e / divisor, where e < divisor. So the product
  // exceeds x / divisor by x e / 2^shift of 1 / divisor, which is less than all of it: x < 2^31 and
  // e < 2^(shift - 31).
  TK_DEVICE_METHOD Result divide(int x) const {
    const uint64_t product = uint64_t{factor_} * static_cast<uint32_t>(x);
    const int quotient = static_cast<int>(product >> shift_);
    return {quotient, x - quotient * static_cast<int>(divisor_)};
  }

 private:
  uint32_t divisor_, shift_, factor_;
};

}  // namespace tk::cuda
