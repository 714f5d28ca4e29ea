// The operators' arguments, converted to kernel params on any device.
#pragma once

#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/tensors.h"
#include "common/options.h"

namespace tk {

// For the fields of any table: parameters of an operator's function, and their names, both after a
// comma; members of a struct.
#define TK_NUMBER_PARAMETER(type, kind, name, ...) , type name
#define TK_TENSOR_PARAMETER(name, ...) , ::tk::Optional name
#define TK_NUMBER_NAME(type, kind, name, ...) , name
#define TK_TENSOR_NAME(name, ...) , std::move(name)
#define TK_TENSOR_COPY(name, ...) , name
#define TK_NUMBER_MEMBER(type, kind, name, ...) type name;
#define TK_TENSOR_MEMBER(name, ...) ::tk::Optional name{};

// Of attention. The names of `Wanted` end with a comma.
#define TK_FIELD_PARAMETERS TK_FIELDS(TK_NUMBER_PARAMETER, TK_TENSOR_PARAMETER)
#define TK_FIELD_NAMES TK_FIELDS(TK_NUMBER_NAME, TK_TENSOR_NAME)

#define TK_WANTED_PARAMETER(name) , bool name##_needs_grad
#define TK_WANTED_PARAMETERS TK_DIFFERENTIABLE(TK_WANTED_PARAMETER)
#define TK_WANTED_NAME(name) name##_needs_grad,
#define TK_WANTED_NAMES TK_DIFFERENTIABLE(TK_WANTED_NAME)

// The schema `text`, fields, `end`.
std::string schema(std::string text, std::span<const Field> fields, const char* end);
std::string forward_schema();
std::string backward_schema();
std::string describe_schema();

// Inputs and fields, as an operator receives them.
struct Arguments {
  Tensor q, k, v;
  TK_FIELDS(TK_NUMBER_MEMBER, TK_TENSOR_MEMBER)

  std::vector<Optional> tensors() const { return {q, k, v TK_FIELDS(TK_NO_FIELD, TK_TENSOR_COPY)}; }
};

// A checked call, which owns every tensor that its params point to.
struct OperatorCall {
  explicit OperatorCall(Arguments&& given);

  Arguments arguments;  // copied where kernels need contiguous tensors
  Device device;
  Options options;
  Problem problem{};
  LayoutParams layout;
};

// Params of a forward pass, with its outputs allocated but not computed.
struct ForwardPass {
  // o has the memory order of q, of which the call may hold a copy.
  ForwardPass(const OperatorCall& call, const Tensor& q);

  Tensor o;
  Tensor row_stats;   // (2, B, H_q, M): lse and its rounding error; lse alone from a cache
  Tensor block_mask;  // empty if the mask needs none
  ForwardParams params{};
};

struct SavedTensors {
  Tensor d_o, o, row_stats;
  Optional dlse, block_mask;
};

#define TK_OPTION(name) , Tensor
using BackwardResults = std::tuple<Tensor, Tensor, Tensor TK_DIFFERENTIABLE(TK_OPTION)>;
#undef TK_OPTION

// The options whose gradients are wanted.
struct Wanted {
#define TK_OPTION(name) bool name = false;
  TK_DIFFERENTIABLE(TK_OPTION)
#undef TK_OPTION
};

// Params of a backward pass, with its outputs allocated but not computed.
struct BackwardPass {
  // dq, dk and dv have the memory order of q, k and v.
  BackwardPass(const OperatorCall& call, SavedTensors given, const Tensor& q, const Tensor& k,
               const Tensor& v, const Wanted& wanted);

  SavedTensors saved;
  Tensor dq, dk, dv;
#define TK_OPTION(name) Tensor d##name;
  TK_DIFFERENTIABLE(TK_OPTION)
#undef TK_OPTION
  BackwardParams params{};

  // The results of the operator. The gradient of an option that is not wanted has no elements.
#define TK_OPTION(name) , d##name
  BackwardResults results() const { return {dq, dk, dv TK_DIFFERENTIABLE(TK_OPTION)}; }
#undef TK_OPTION
};

}  // namespace tk
