// CPU fast path: calls the kernels without torch's dispatcher, which costs more than a short
// attention. transformer_kernels/dispatch/fast_path.py calls these functions if nothing may
// intercept an operator. For an unsupported call they return the reason, with nothing computed or
// raised; the call then runs through cpu_operators.cpp.
#include "bindings/fast_path/functions.h"

#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "bindings/fast_path/readers.h"
#include "cpu/driver/call.h"
#include "cpu/driver/decode.h"

namespace tk {

namespace {

using namespace direct;

const Reason kUnread = "a tensor is on another device, has no plain memory or is negated lazily";
const Reason kUnreadOptions =
    "scale is no finite float, or a tensor of the mask is on another device or has no plain memory";

// The arguments that begin every call: q, k, v, scores, mask, layout.
struct DirectCall {
  Inputs inputs;
  Options options;
  LayoutParams layout;
  Indices indices;  // to which `layout` refers

  // Returns the reason why the call is declined; empty if it is not.
  Reason read(PyObject* const* args, Problem& p) {
    if (!read_input(args[0], inputs.q) || !read_input(args[1], inputs.k) ||
        !read_input(args[2], inputs.v)) {
      return kUnread;
    }
    if (!read_options(args + 3, options)) return kUnreadOptions;
    Reason reason = set_problem(p, layout, inputs, options);
    if (!reason.empty()) return reason;
    if (layout.kind == LayoutKind::kVarlen) return "packed sequences";
    indices = read_values(p, layout, options, reason);
    return reason;
  }
};

PyObject* declined(const Reason& reason) {
  return PyUnicode_FromStringAndSize(reason.data(), static_cast<Py_ssize_t>(reason.size()));
}

// Returns false with a Python exception set if the counts differ.
bool count_is(Py_ssize_t count, Py_ssize_t wanted) {
  if (count == wanted) return true;
  PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, count);
  return false;
}

// Runs without the GIL, as torch's operators do. Returns None, the reason why the kernels decline
// what they read, or null with a Python exception set.
template <typename Params>
PyObject* run_unlocked(Params& params, const LayoutParams& layout) {
  std::optional<std::string> failure;
  Reason reason;
  Py_BEGIN_ALLOW_THREADS;
  try {
    run(params, layout);
  } catch (const InvalidScale& error) {
    reason = error.what();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  Py_END_ALLOW_THREADS;
  if (!reason.empty()) return declined(reason);
  if (!failure) Py_RETURN_NONE;
  PyErr_SetString(PyExc_RuntimeError, failure->c_str());
  return nullptr;
}

// Further arguments: block_mask or None, grouped, o, row_stats or None, runs. `runs` is False if
// the caller only asks for the reason.
PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!count_is(count, 11)) return nullptr;
  ForwardParams params{};
  DirectCall call;
  View block_mask, o, row_stats;
  Reason reason = call.read(args, params);
  if (reason.empty() && args[7] != Py_True && params.H_q != params.H_kv) {
    reason = "k has fewer heads than q";
  } else if (reason.empty() && params.D != params.D_v) {
    reason = "v has another width than q";
  }
  if (reason.empty()) {
    const bool read_all =
        read_optional(args[6], block_mask) && read(args[8], o) && read_optional(args[9], row_stats);
    reason = read_all ? set_outputs(params, call.options, o, row_stats, block_mask) : kUnread;
  }
  if (!reason.empty()) return declined(reason);
  if (args[10] != Py_True) Py_RETURN_NONE;
  return run_unlocked(params, call.layout);
}

// Further arguments: block_mask or None, o, row_stats, do, dq, dk, dv.
PyObject* backward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!count_is(count, 13)) return nullptr;
  BackwardParams params{};
  DirectCall call;
  BackwardTensors x;
  Reason reason = call.read(args, params);
  if (reason.empty() && call.layout.kind != LayoutKind::kDense) reason = "a cache";
  if (reason.empty()) {
    const bool read_all = read_optional(args[6], x.block_mask) && read(args[7], x.o) &&
                          read(args[8], x.row_stats) && read_input(args[9], x.d_o) &&
                          read(args[10], x.dq) && read(args[11], x.dk) && read(args[12], x.dv);
    reason = read_all ? set_tensors(params, call.options, x) : kUnread;
  }
  return reason.empty() ? run_unlocked(params, call.layout) : declined(reason);
}

template <typename Function>
PyCFunction as_method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"direct_forward", as_method(&forward), METH_FASTCALL, nullptr},
    {"direct_backward", as_method(&backward), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_direct_functions(PyObject* module) {
  find_torch();
  return PyModule_AddFunctions(module, methods) == 0;
}

}  // namespace tk
