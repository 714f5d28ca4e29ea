// CPU fast path: calls the kernels without torch's dispatcher, which costs more than a short
// attention. transformer_kernels/dispatch/fast_path.py calls these functions if nothing may
// intercept an operator. They return False, with nothing computed or raised, for unsupported calls;
// the call then runs through cpu_operators.cpp.
#include "bindings/fast_path/arguments.h"
#include "bindings/fast_path/functions.h"
#include "cpu/driver/dense.h"

namespace tk {

namespace {

using namespace direct;

bool is_like_o(const View& x, const Problem& p) {
  return x.dtype == p.dtype && has_size(x, p.B, p.H_q, p.M, p.D_v);
}

bool is_lse(const View& x, const Problem& p) {
  const DType wanted = p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  return x.dtype == wanted && x.size[0] == p.B && x.size[1] == p.H_q && x.size[2] == p.M &&
         (x.stride[2] == 1 || p.M == 1) && (x.stride[1] == p.M || p.H_q == 1) &&
         (x.stride[0] == p.H_q * p.M || p.B == 1);
}

// Arguments: q, k, v, the mask's arguments, scale.
constexpr Py_ssize_t kProblemArguments = 3 + kMaskArguments + 1;

bool read_problem(PyObject* const* args, Problem& p) {
  View q, k, v;
  return read_input(args[0], q) && read_input(args[1], k) && read_input(args[2], v) &&
         set_tensors(p, q, k, v) && read_mask(args + 3, p) &&
         read_scale(args[3 + kMaskArguments], p);
}

// Arguments after those of the problem: grouped, o, lse or None.
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
  return run_unlocked([&] { run_forward(params); });
}

// Arguments after those of the problem: o, lse, do, dq, dk, dv.
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
  return run_unlocked([&] { run_backward(params); });
}

template <typename Function>
PyCFunction as_method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"direct_forward", as_method(&forward), METH_FASTCALL, nullptr},
    {"direct_backward", as_method(&backward), METH_FASTCALL, nullptr},
    {"direct_decode", as_method(&direct::decode), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_direct_functions(PyObject* module) {
  find_torch();
  return PyModule_AddFunctions(module, methods) == 0;
}

}  // namespace tk
