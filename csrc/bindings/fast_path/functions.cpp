// CPU fast path: calls the kernels without torch's dispatcher, which costs more than a short
// attention. transformer_kernels/dispatch/fast_path.py calls these functions if nothing may
// intercept an operator. For an unsupported call they return the reason, with nothing computed or
// raised; the call then runs through cpu_operators.cpp.
#include "bindings/fast_path/functions.h"

#include "bindings/fast_path/direct_call.h"
#include "cpu/driver/call.h"
#include "cpu/driver/decode.h"

namespace tk {

namespace {

using namespace direct;

struct CpuCall : DirectCall {
  Indices indices;  // to which `layout` refers

  CpuCall() : DirectCall({dlpack::kCpu, 0}) {}

  Reason read(PyObject* const* args, Problem& p) {
    Reason reason = DirectCall::read(args, p);
    if (!reason.empty()) return reason;
    if (layout.kind == LayoutKind::kVarlen) return "packed sequences";
    indices = read_values(p, layout, options, reason);
    return reason;
  }
};

template <typename Params>
PyObject* run_on_cpu(Params& params, const LayoutParams& layout) {
  return run_unlocked([&]() -> Reason {
    try {
      run(params, layout);
    } catch (const InvalidScale& error) {
      return error.what();
    }
    return {};
  });
}

// Further arguments: block_mask or None, grouped, o, row_stats or None, runs. `runs` is False if
// the caller only asks for the reason.
PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!count_is(count, 11)) return nullptr;
  ForwardParams params{};
  CpuCall call;
  View block_mask, o, row_stats;
  Reason reason = call.read(args, params);
  if (reason.empty() && args[7] != Py_True && params.H_q != params.H_kv) {
    reason = "k has fewer heads than q";
  } else if (reason.empty() && params.D != params.D_v) {
    reason = "v has another width than q";
  }
  if (reason.empty()) {
    const bool read_all = call.reader.read_optional(args[6], block_mask) &&
                          call.reader.read(args[8], o) &&
                          call.reader.read_optional(args[9], row_stats);
    reason = read_all ? set_outputs(params, call.options, o, row_stats, block_mask) : kUnread;
  }
  if (!reason.empty()) return declined(reason);
  if (args[10] != Py_True) Py_RETURN_NONE;
  return run_on_cpu(params, call.layout);
}

// Further arguments: block_mask or None, o, row_stats, do, dq, dk, dv.
PyObject* backward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!count_is(count, 13)) return nullptr;
  BackwardParams params{};
  CpuCall call;
  BackwardTensors x;
  Reason reason = call.read(args, params);
  if (reason.empty() && call.layout.kind != LayoutKind::kDense) reason = "a cache";
  if (reason.empty()) {
    const Reader& reader = call.reader;
    const bool read_all = reader.read_optional(args[6], x.block_mask) &&
                          reader.read(args[7], x.o) && reader.read(args[8], x.row_stats) &&
                          reader.read_input(args[9], x.d_o) && reader.read(args[10], x.dq) &&
                          reader.read(args[11], x.dk) && reader.read(args[12], x.dv);
    reason = read_all ? set_tensors(params, call.options, x) : kUnread;
  }
  return reason.empty() ? run_on_cpu(params, call.layout) : declined(reason);
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
