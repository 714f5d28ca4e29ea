// A call of any layout on the CPU, shared by the dispatcher operators and the direct calls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/options.h"
#include "common/params.h"

namespace tk {

// Memory to which the layout of a call refers.
struct Indices {
  std::vector<int32_t> lengths, pages;  // lengths or offsets
};

// Reads the tensors whose values determine addresses or random bits: the seed into p, and offsets,
// lengths and pages into the result. `reason` is set if they do not fit.
Indices read_values(Problem& p, LayoutParams& layout, const Options& options, Reason& reason);

// Describes the kernel of the forward pass: for packed sequences that of the longest one.
std::string describe(const Problem& p, const LayoutParams& layout);

void run(ForwardParams& params, const LayoutParams& layout);
// The layout is not a cache.
void run(BackwardParams& params, const LayoutParams& layout);

}  // namespace tk
