// Sequences of different lengths, packed one behind another: a call of the kernels for each.
#pragma once

#include <cstdint>

#include "common/params.h"

namespace tk {

// Whether every sequence lies within the M queries and N keys of all.
bool fits(const Varlen& varlen, int64_t M, int64_t N);

// `packed` has one batch entry, which holds all rows. Those behind the last sequence see nothing.
void run_forward(const ForwardParams& packed, const Varlen& varlen);
void run_backward(const BackwardParams& packed, const Varlen& varlen);

}  // namespace tk
