// Layout of a matrix operand in shared memory.
#pragma once

#include <cstdint>

namespace tk::cuda {

// The index that is contiguous: k, or the row of a and the column of b.
enum class Major : uint8_t { kK = 0, kMN = 1 };

}  // namespace tk::cuda
