// One call of the kernels, whoever asks: the operators for torch's dispatcher, direct.cpp past it.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "cpu/engine/workers.h"

namespace tk {

// What remains when all else is set: which keys are used, threads and workspace. A forward call
// writes the mask's block mask, where there is one; if its params have no lse, none is wanted.
void run_forward(ForwardParams& params);
void run_backward(BackwardParams& params);

// torch's own threads; operators.cpp lends them.
cpu::Workers workers();

}  // namespace tk
