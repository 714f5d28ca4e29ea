// Gradients of a relative bias and of relative keys: the kernels' sums by distance, added over
// heads and sequences.
#pragma once

#include <memory>
#include <span>

#include "common/params.h"

namespace tk {

using DistanceSums = std::unique_ptr<char[]>;

// Makes the sums of these problems refer to memory, which it returns; none if no gradient is
// needed.
DistanceSums allocate_distance_sums(std::span<BackwardParams> problems);

// Writes drelative_bias and drelative_keys of `call` from the sums of its sequences, in their
// order. The table of a sequence is a part of that of the call.
void sum_distances(const BackwardParams& call, std::span<const BackwardParams> sequences);

}  // namespace tk
