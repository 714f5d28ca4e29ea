// Arguments of the operators of linear attention, converted to kernel params on any device.
#pragma once

#include <string>
#include <tuple>

#include "bindings/tensors.h"
#include "common/linear_params.h"

namespace tk {

// Schemas of the operators linear_forward, linear_backward and linear_steps.
std::string linear_forward_schema();
std::string linear_backward_schema();
std::string linear_steps_schema();

// The arguments that all operators share.
struct LinearArguments {
  Tensor q, k, v;
  Optional log_decay, S, z, cu_seqlens, key_start, key_end;
  int64_t feature_map;
  bool causal, normalize;
  double eps;
};

#define TK_LINEAR_PARAMETERS                                                                     \
  Tensor q, Tensor k, Tensor v, Optional log_decay, Optional S, Optional z, Optional cu_seqlens, \
      Optional key_start, Optional key_end, int64_t feature_map, bool causal, bool normalize,    \
      double eps
#define TK_LINEAR_ARGUMENTS \
  {q, k, v, log_decay, S, z, cu_seqlens, key_start, key_end, feature_map, causal, normalize, eps}

// Checked arguments, copied where kernels need contiguous tensors. Raises an error if a tensor does
// not fit; the values of cu_seqlens are not read.
struct LinearCall {
  explicit LinearCall(LinearArguments given);

  LinearArguments arguments;
  Device device;
  LinearProblem problem{};
};

// Params of a forward pass, with its outputs allocated but not computed.
struct LinearForwardPass {
  explicit LinearForwardPass(const LinearCall& call);

  Tensor o, normalizer, S, z;
  LinearForwardParams params{};
};

struct LinearSaved {
  Tensor d_o;
  Optional dS_end, dz_end;
  Tensor o, normalizer;
};

// Params of a backward pass, with its outputs allocated but not computed. The gradient of an option
// that is not given or not wanted has no elements.
struct LinearBackwardPass {
  LinearBackwardPass(const LinearCall& call, LinearSaved given, bool log_decay_needs_grad);

  LinearSaved saved;
  Tensor dq, dk, dv, dlog_decay, dS, dz;
  LinearBackwardParams params{};

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> results() const {
    return {dq, dk, dv, dlog_decay, dS, dz};
  }
};

// Params of linear_steps, which overwrites the state of the call.
struct LinearStepsPass {
  explicit LinearStepsPass(const LinearCall& call);

  Tensor o;
  LinearForwardParams params{};
};

}  // namespace tk
