// Conversion of Python objects to kernel arguments, for the CPU fast path. The readers return
// false, with no Python exception set, for anything but plain valid arguments.
#pragma once

#include <Python.h>

#include <exception>
#include <optional>
#include <string>

#include "bindings/fast_path/dlpack.h"
#include "common/params.h"
#include "common/tensor_view.h"

namespace tk::direct {

// Must be called first. Without torch's DLPack exchange table every call is declined.
void find_torch();

// Reads a CPU tensor of type torch.Tensor or Parameter with this number of dimensions; valid as
// long as the tensor. Tensors without memory (freed, sparse, transform wrappers) are declined.
bool read(PyObject* object, int32_t dimensions, dlpack::Tensor& tensor);

// The same, for the floating-point dtypes of attention.
bool read(PyObject* object, int32_t dimensions, View& view);

// A 4-D input of the caller. Declines lazy negations, which DLPack does not report.
bool read_input(PyObject* object, View& view);

// An int of magnitude at most UNBOUNDED of masks/resolved.py.
bool read_integer(PyObject* object, int64_t& to);

// diagonal_low and diagonal_high of a ResolvedMask.
bool read_diagonals(PyObject* const* args, Problem& p);

// Reads the fields of a ResolvedMask, and the block mask to fill or None, into p.mask. The sizes in
// p must be set.
constexpr Py_ssize_t kMaskArguments = 10;
bool read_mask(PyObject* const* args, Problem& p);

// A float, or None for 1/sqrt(D).
bool read_scale(PyObject* object, Problem& p);

bool has_size(const View& x, int64_t B, int64_t H, int64_t L, int64_t width);

// True if x has this shape, the dtype of p and a unit last stride, as outputs must have.
bool is_output(const View& x, const Problem& p, int64_t H, int64_t L, int64_t width);

// Returns false with a Python exception set if the counts differ.
bool count_is(Py_ssize_t count, Py_ssize_t wanted);

// Runs without the GIL, as torch's operators do. Returns True, or null with a Python exception set.
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

// Implemented in fast_path/decode.cpp.
PyObject* decode(PyObject*, PyObject* const* args, Py_ssize_t count);

}  // namespace tk::direct
