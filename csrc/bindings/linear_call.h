// Arguments of the operators of linear attention, converted to kernel params on any device.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "bindings/operator_call.h"
#include "common/linear_fields.h"
#include "common/linear_params.h"

namespace tk {

// Parameters of the operators' functions, and the LinearArguments of these.
#define TK_LINEAR_PARAMETERS \
  Tensor q, Tensor k, Tensor v TK_LINEAR_FIELDS(TK_NUMBER_PARAMETER, TK_TENSOR_PARAMETER)
#define TK_LINEAR_ARGUMENTS {q, k, v TK_LINEAR_FIELDS(TK_NUMBER_NAME, TK_TENSOR_NAME)}

#define TK_STATE_PARAMETER(name, ...) , ::tk::Tensor name
#define TK_GIVEN_NUMBER(type, kind, name) , .name = name
#define TK_GIVEN_TENSOR(name, ...) , .name = std::move(name)
#define TK_LINEAR_STEP_PARAMETERS \
  Tensor q, Tensor k,             \
      Tensor v TK_LINEAR_STEP_FIELDS(TK_NUMBER_PARAMETER, TK_TENSOR_PARAMETER, TK_STATE_PARAMETER)
#define TK_LINEAR_STEP_ARGUMENTS \
  {.q = q, .k = k, .v = v TK_LINEAR_STEP_FIELDS(TK_GIVEN_NUMBER, TK_GIVEN_TENSOR, TK_GIVEN_TENSOR)}

std::string linear_forward_schema();
std::string linear_backward_schema();
std::string linear_steps_schema();

// Inputs and fields, as an operator receives them.
struct LinearArguments {
  Tensor q, k, v;
#define TK_PASS_NUMBER(type, kind, name, value) type name = value;
  TK_LINEAR_ROWS(TK_NUMBER_MEMBER, TK_TENSOR_MEMBER, TK_TENSOR_MEMBER, TK_PASS_NUMBER,
                 TK_TENSOR_MEMBER)
#undef TK_PASS_NUMBER

  std::vector<Optional> tensors() const {
    return {q, k, v TK_LINEAR_FIELDS(TK_NO_FIELD, TK_TENSOR_COPY)};
  }
};

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

// Raises an error unless the state can be overwritten in place.
LinearArguments with_own_state(LinearArguments given);

// Params of linear_steps, which overwrites the state of the call.
struct LinearStepsPass {
  explicit LinearStepsPass(const LinearCall& call);

  Tensor o;
  LinearForwardParams params{};
};

}  // namespace tk
