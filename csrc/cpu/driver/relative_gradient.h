// Gradient of a relative bias: the kernels' sums by distance, added over heads and sequences.
#pragma once

#include <span>
#include <vector>

#include "common/params.h"

namespace tk {

// Makes the sums of these problems refer to memory, which it returns; none if no gradient is
// needed.
std::vector<char> allocate_distance_sums(std::span<BackwardParams> problems);

// Writes drelative_bias of `call` from the sums of its sequences, in their order. The table of a
// sequence is a part of that of the call.
void sum_distances(const BackwardParams& call, std::span<const BackwardParams> sequences);

}  // namespace tk
