// CUDA launch entry points of linear attention, called by the operators. Plain C++.
#pragma once

#include <cstddef>

#include "common/linear_params.h"

namespace tk::cuda {

// Bytes of device workspace that a pass needs.
size_t linear_workspace(const LinearForwardParams& params);
size_t linear_workspace(const LinearBackwardParams& params);

// Enqueues a pass on the stream of the current device, asynchronously. Results of packed sequences
// must be initialized to zero: rows after the last sequence are not written. Throws
// std::runtime_error for CUDA errors.
void linear_forward(const LinearForwardParams& params, void* workspace, void* stream);
void linear_backward(const LinearBackwardParams& params, void* workspace, void* stream);

// The recurrence for few tokens. Overwrites params.end, the initial state, by the final one.
void linear_steps(const LinearForwardParams& params, void* stream);

}  // namespace tk::cuda
