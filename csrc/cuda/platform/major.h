// Layout of a matrix operand in shared memory.
#pragma once

#include <cstdint>

namespace tk::cuda {

// The contiguous index of an operand: k, or the row of a (m) and the column of b (n).
enum class Major : uint8_t { kK = 0, kMN = 1 };

}  // namespace tk::cuda
