// CPU launch entry points, shared by the dispatcher operators and the fast path.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "cpu/engine/workers.h"

namespace tk {

// Fills in the derived fields (live keys, threads, workspace) and launches the kernel. The forward
// pass also writes the block mask if the mask needs one. A null params.lse skips the log-sum-exp
// output.
void run_forward(ForwardParams& params);
void run_backward(BackwardParams& params);

// torch's intra-op thread pool; defined in bindings/cpu_operators.cpp.
cpu::Workers workers();

}  // namespace tk
