// Python objects as the kernels' arguments, for direct.cpp and direct_decode.cpp. What is not
// plainly right is declined: false, with no Python exception set.
#pragma once

#include <Python.h>

#include <exception>
#include <optional>
#include <string>

#include "bindings/fast_path/dlpack.h"
#include "common/params.h"
#include "common/tensor_view.h"

namespace tk::direct {

// Before anything else; without torch's exchange every call is declined.
void find_torch();

// A CPU tensor of exactly these types and so many dimensions, good as long as the tensor. One
// without memory of its own (sparse, a wrapper of a transform) is declined.
bool read(PyObject* object, int32_t dimensions, dlpack::Tensor& tensor);

// The same, of a dtype that attention takes.
bool read(PyObject* object, int32_t dimensions, View& view);

// Of four dimensions and the caller's: it may be a lazy negation, of which DLPack does not tell.
bool read_input(PyObject* object, View& view);

// An int, no further from 0 than UNBOUNDED in bound_mask.py.
bool read_integer(PyObject* object, int64_t& to);

// diagonal_low and diagonal_high of a `ResolvedMask`.
bool read_diagonals(PyObject* const* args, Problem& p);

// A `ResolvedMask`, field by field, and room for its block mask or None. Goes to p.mask; the
// sizes in p must be known.
constexpr Py_ssize_t kMaskArguments = 10;
bool read_mask(PyObject* const* args, Problem& p);

// A float, or None for that of the width.
bool read_scale(PyObject* object, Problem& p);

bool has_size(const View& x, int64_t B, int64_t H, int64_t L, int64_t width);

// A tensor that Python made, to be written; in rows, as the operators make theirs.
bool is_output(const View& x, const Problem& p, int64_t H, int64_t L, int64_t width);

// False with a Python exception set.
bool count_is(Py_ssize_t count, Py_ssize_t wanted);

// Runs without the interpreter's lock, as torch's operators do. True, or an exception.
template <typename Run>
PyObject* run_unlocked(Run&& run) {
  std::optional<std::string> failure;
  Py_BEGIN_ALLOW_THREADS;
  try {
    run();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  Py_END_ALLOW_THREADS;
  if (!failure) Py_RETURN_TRUE;
  PyErr_SetString(PyExc_RuntimeError, failure->c_str());
  return nullptr;
}

// Of direct_decode.cpp.
PyObject* decode(PyObject*, PyObject* const* args, Py_ssize_t count);

}  // namespace tk::direct
