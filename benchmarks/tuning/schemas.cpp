// The operators of attention in the namespace of a tuning library, without CPU kernels.
#include "bindings/namespace.h"
#include "bindings/operator_call.h"

TK_DEFINE(TK_LIBRARY, m) {
  m.def(tk::forward_schema().c_str());
  m.def(tk::backward_schema().c_str());
  m.def(tk::describe_schema().c_str());
}
