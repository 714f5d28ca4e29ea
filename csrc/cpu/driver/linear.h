// Launch of linear attention and of the delta rule on the CPU.
#pragma once

#include "common/linear_params.h"

namespace tk {

void run_linear_forward(const LinearForwardParams& params);
void run_linear_backward(const LinearBackwardParams& params);
// `initial` and `end` are the same memory.
void run_linear_steps(const LinearForwardParams& params);

void run_delta_forward(const DeltaForwardParams& params);
void run_delta_backward(const DeltaBackwardParams& params);
void run_delta_steps(const DeltaForwardParams& params);

}  // namespace tk
