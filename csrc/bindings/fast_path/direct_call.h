// What the direct calls of the CPU and the CUDA kernels share.
#pragma once

#include <exception>
#include <optional>
#include <string>

#include "bindings/fast_path/readers.h"

namespace tk::direct {

inline const Reason kUnread =
    "a tensor is on another device, has no plain memory or is negated lazily";
inline const Reason kUnreadOptions =
    "scale is no finite float, or a tensor of the mask is on another device or has no plain memory";

// The arguments that begin every call: q, k, v, scores, mask, layout.
struct DirectCall {
  Reader reader;
  Inputs inputs;
  Options options;
  LayoutParams layout;

  explicit DirectCall(dlpack::Device device) : reader(device) {}

  // Returns the reason why the call is declined; empty if it is not.
  Reason read(PyObject* const* args, Problem& p) {
    if (!reader.read_input(args[0], inputs.q) || !reader.read_input(args[1], inputs.k) ||
        !reader.read_input(args[2], inputs.v)) {
      return kUnread;
    }
    if (!reader.read_options(args + 3, options)) return kUnreadOptions;
    return set_problem(p, layout, inputs, options);
  }
};

inline PyObject* declined(const Reason& reason) {
  return PyUnicode_FromStringAndSize(reason.data(), static_cast<Py_ssize_t>(reason.size()));
}

// Returns false with a Python exception set if the counts differ.
inline bool count_is(Py_ssize_t count, Py_ssize_t wanted) {
  if (count == wanted) return true;
  PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, count);
  return false;
}

// Runs without the GIL, as torch's operators do. `run` returns the reason why it declines. Returns
// None, that reason, or null with a Python exception set.
template <typename Run>
PyObject* run_unlocked(const Run& run) {
  std::optional<std::string> failure;
  Reason reason;
  Py_BEGIN_ALLOW_THREADS;
  try {
    reason = run();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  Py_END_ALLOW_THREADS;
  if (!reason.empty()) return declined(reason);
  if (!failure) Py_RETURN_NONE;
  PyErr_SetString(PyExc_RuntimeError, failure->c_str());
  return nullptr;
}

template <typename Function>
PyCFunction as_method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace tk::direct
