// The kernels past torch's dispatcher, which costs a short call more than its computation does.
// transformer_kernels/direct.py calls these where nothing could intercept an operator. They decline
// by returning False, with nothing computed or raised; the call then goes through operators.cpp.
#include "direct.h"

#include <cmath>
#include <exception>
#include <optional>
#include <string>

#include "dlpack.h"
#include "run.h"
#include "view.h"

namespace tk {

namespace {

constexpr int64_t kUnbounded = int64_t{1} << 62;  // UNBOUNDED in bound_mask.py

// Found once, when the module is loaded, and kept like it.
struct Torch {
  PyObject* tensor = nullptr;
  PyObject* parameter = nullptr;
  PyObject* is_neg = nullptr;
  const dlpack::Exchange* exchange = nullptr;  // null: every call is declined
} torch;

PyObject* attribute_of_module(const char* module, const char* name) {
  PyObject* const found = PyImport_ImportModule(module);
  PyObject* const attribute = found ? PyObject_GetAttrString(found, name) : nullptr;
  Py_XDECREF(found);
  return attribute;
}

void find_torch() {
  torch.is_neg = PyUnicode_InternFromString("is_neg");
  torch.tensor = attribute_of_module("torch", "Tensor");
  torch.parameter = attribute_of_module("torch.nn", "Parameter");
  PyObject* const capsule =
      torch.tensor ? PyObject_GetAttrString(torch.tensor, "__dlpack_c_exchange_api__") : nullptr;
  if (capsule) {
    const void* const table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    torch.exchange = static_cast<const dlpack::Exchange*>(table);
    Py_DECREF(capsule);
  }
  while (torch.exchange && torch.exchange->version.major != dlpack::kMajorVersion) {
    torch.exchange = torch.exchange->previous;
  }
  PyErr_Clear();
}

bool read_dtype(const dlpack::DataType& from, DType& to) {
  if (from.lanes != 1) return false;
  if (from.code == dlpack::kBfloat && from.bits == 16) return to = DType::kBFloat16, true;
  if (from.code != dlpack::kFloat) return false;
  if (from.bits == 16) return to = DType::kFloat16, true;
  if (from.bits == 32) return to = DType::kFloat32, true;
  if (from.bits == 64) return to = DType::kFloat64, true;
  return false;
}

// A view of a tensor of exactly these types, good as long as the tensor. One without memory of its
// own (sparse, a wrapper of a transform, on another device) gives none.
bool read(PyObject* object, int32_t dimensions, View& view) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (!torch.exchange || (type != torch.tensor && type != torch.parameter)) return false;
  dlpack::Tensor tensor;
  if (torch.exchange->tensor_from_object(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  view = {tensor.data, {}, tensor.shape, tensor.strides};
  return tensor.device.type == dlpack::kCpu && tensor.ndim == dimensions && tensor.data &&
         tensor.byte_offset == 0 && tensor.strides && read_dtype(tensor.dtype, view.dtype);
}

// An input is the caller's, and may be a lazy negation, of which DLPack does not tell.
bool read_input(PyObject* object, View& view) {
  if (!read(object, 4, view)) return false;
  PyObject* const negated = PyObject_CallMethodNoArgs(object, torch.is_neg);
  Py_XDECREF(negated);
  PyErr_Clear();
  return negated == Py_False;
}

bool has_size(const View& x, int64_t B, int64_t H, int64_t L, int64_t width) {
  return x.size[0] == B && x.size[1] == H && x.size[2] == L && x.size[3] == width;
}

bool is_like_o(const View& x, const Problem& p) {
  return x.dtype == p.dtype && has_size(x, p.B, p.H_q, p.M, p.D_v);
}

// A tensor that direct.py made, to be written; in rows, as the operators make theirs.
bool is_output(const View& x, const Problem& p, int64_t H, int64_t L, int64_t width) {
  return x.dtype == p.dtype && has_size(x, p.B, H, L, width) && (width == 1 || x.stride[3] == 1);
}

bool is_lse(const View& x, const Problem& p) {
  const DType wanted = p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  return x.dtype == wanted && x.size[0] == p.B && x.size[1] == p.H_q && x.size[2] == p.M &&
         (x.stride[2] == 1 || p.M == 1) && (x.stride[1] == p.M || p.H_q == 1) &&
         (x.stride[0] == p.H_q * p.M || p.B == 1);
}

// An int, or what stands in for None.
bool read_integer(PyObject* object, int64_t none, int64_t& to) {
  to = object == Py_None ? none : PyLong_AsLongLong(object);
  const bool fits = -kUnbounded <= to && to <= kUnbounded && !PyErr_Occurred();
  PyErr_Clear();
  return fits;
}

// left, right, bottom_right: the fields of a `constraints.Window`.
bool read_window(PyObject* const* args, Problem& p) {
  int64_t left, right;
  if (!read_integer(args[0], kUnbounded, left) || !read_integer(args[1], kUnbounded, right)) {
    return false;
  }
  const int64_t d = args[2] == Py_True ? p.N - p.M : 0;
  p.mask.diagonal_low = left == kUnbounded ? -kUnbounded : d - left;
  p.mask.diagonal_high = right == kUnbounded ? kUnbounded : d + right;
  return true;
}

bool read_scale(PyObject* object, Problem& p) {
  if (object == Py_None) {
    p.score.scale = 1.0 / std::sqrt(static_cast<double>(p.D));
    return true;
  }
  if (!PyFloat_CheckExact(object)) return false;
  p.score.scale = PyFloat_AS_DOUBLE(object);
  return std::isfinite(p.score.scale);
}

// q, k, v, left, right, bottom_right, scale
constexpr Py_ssize_t kProblemArguments = 7;

bool read_problem(PyObject* const* args, Problem& p) {
  View q, k, v;
  return read_input(args[0], q) && read_input(args[1], k) && read_input(args[2], v) &&
         set_tensors(p, q, k, v) && read_window(args + 3, p) && read_scale(args[6], p);
}

// Runs without the interpreter's lock, as torch's operators do.
template <typename Params>
PyObject* run_unlocked(void (*run)(Params&), Params& params) {
  std::optional<std::string> failure;
  Py_BEGIN_ALLOW_THREADS;
  try {
    run(params);
  } catch (const std::exception& error) {
    failure = error.what();
  }
  Py_END_ALLOW_THREADS;
  if (!failure) Py_RETURN_TRUE;
  PyErr_SetString(PyExc_RuntimeError, failure->c_str());
  return nullptr;
}

bool count_is(Py_ssize_t count, Py_ssize_t wanted) {
  if (count == wanted) return true;
  PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, count);
  return false;
}

// After the problem's arguments: grouped, o, lse or None.
PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!count_is(count, kProblemArguments + 3)) return nullptr;
  ForwardParams params{};
  View o, lse;
  if (!read_problem(args, params)) Py_RETURN_FALSE;
  args += kProblemArguments;
  if (args[0] != Py_True && params.H_q != params.H_kv) Py_RETURN_FALSE;
  if (!read(args[1], 4, o) || !is_output(o, params, params.H_q, params.M, params.D_v)) {
    Py_RETURN_FALSE;
  }
  params.o = strided(o);
  if (args[2] != Py_None) {
    if (!read(args[2], 3, lse) || !is_lse(lse, params)) Py_RETURN_FALSE;
    params.lse = lse.data;
  }
  return run_unlocked(&run_forward, params);
}

// After the problem's arguments: o, lse, do, dq, dk, dv.
PyObject* backward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!count_is(count, kProblemArguments + 6)) return nullptr;
  BackwardParams params{};
  View o, lse, d_o, dq, dk, dv;
  if (!read_problem(args, params)) Py_RETURN_FALSE;
  args += kProblemArguments;
  if (!read(args[0], 4, o) || !read(args[1], 3, lse) || !read_input(args[2], d_o) ||
      !read(args[3], 4, dq) || !read(args[4], 4, dk) || !read(args[5], 4, dv)) {
    Py_RETURN_FALSE;
  }
  const Problem& p = params;
  if (!is_like_o(o, p) || !is_like_o(d_o, p) || !is_lse(lse, p) ||
      !is_output(dq, p, p.H_q, p.M, p.D) || !is_output(dk, p, p.H_kv, p.N, p.D) ||
      !is_output(dv, p, p.H_kv, p.N, p.D_v)) {
    Py_RETURN_FALSE;
  }
  params.o = strided(o);
  params.d_o = strided(d_o);
  params.dq = strided(dq);
  params.dk = strided(dk);
  params.dv = strided(dv);
  params.lse = lse.data;
  return run_unlocked(&run_backward, params);
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
