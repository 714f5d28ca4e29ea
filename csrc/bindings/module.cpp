// The Python module: functions of the extension that are not operators. It uses the limited API
// (PEP 384), so that one build serves every Python from 3.11 on.

#include <Python.h>

#include <span>
#include <stdexcept>
#include <string>

#include "bindings/fast_path/functions.h"
#include "common/fields.h"
#include "common/linear_fields.h"
#include "common/workspace.h"
#include "cpu/driver/isa_dispatch.h"
#include "cuda/common/tile_config.h"

namespace {

#if defined(__clang__)
constexpr char kCompiler[] = "clang " __clang_version__;
#elif defined(__GNUC__)
constexpr char kCompiler[] = "gcc " __VERSION__;
#else
constexpr char kCompiler[] = "unknown";
#endif

// Defined by setup.py if CUDA kernels are built.
#ifdef TK_CUDA_VERSION
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#define TK_CUDA_VERSION ""
#define TK_CUDA_ARCHITECTURES ""
#endif

// Functions that return an object return a new one, or null with an exception set.

PyObject* to_python(const std::string& text) { return PyUnicode_FromString(text.c_str()); }
PyObject* to_python(int number) { return PyLong_FromLong(number); }
PyObject* to_python(const tk::Field& x) {
  return Py_BuildValue("(ssss)", x.name, x.kind, x.shape, x.layouts);
}

template <typename Items>
PyObject* list_of(const Items& items) {
  PyObject* const list = PyList_New(0);
  for (const auto& item : items) {
    PyObject* const object = to_python(item);
    const bool appended = list && object && PyList_Append(list, object) == 0;
    Py_XDECREF(object);
    if (!appended) {
      Py_XDECREF(list);
      return nullptr;
    }
  }
  return list;
}

template <typename Items>
PyObject* tuple_of(const Items& items) {
  PyObject* const list = list_of(items);
  PyObject* const tuple = list ? PyList_AsTuple(list) : nullptr;
  Py_XDECREF(list);
  return tuple;
}

PyObject* build_info(PyObject*, PyObject*) {
  const std::string standard = "C++" + std::to_string(__cplusplus / 100 % 100);
  PyObject* const architectures = PyUnicode_FromString(TK_CUDA_ARCHITECTURES);
  PyObject* const info = Py_BuildValue(
      "{ss ss ss ss sN ss sN}", "compiler", kCompiler, "cxx_standard", standard.c_str(), "torch",
      TK_TORCH_VERSION, "minimum_torch", TK_MINIMUM_TORCH_VERSION, "isas",
      list_of(tk::cpu::built_isas()), "cuda", TK_CUDA_VERSION, "cuda_architectures",
      architectures ? PyObject_CallMethod(architectures, "split", nullptr) : nullptr);
  Py_XDECREF(architectures);
  return info;
}

PyObject* cpu_features(PyObject*, PyObject*) {
  PyObject* const features = PyDict_New();
  for (const auto& [name, present] : tk::cpu::cpu_features()) {
    if (!features || PyDict_SetItemString(features, name, present ? Py_True : Py_False) != 0) {
      Py_XDECREF(features);
      return nullptr;
    }
  }
  return features;
}

PyObject* built_isas(PyObject*, PyObject*) { return list_of(tk::cpu::built_isas()); }

PyObject* isa(PyObject*, PyObject*) { return to_python(tk::cpu::isa()); }

PyObject* force_isa(PyObject*, PyObject* name) {
  const char* const text = PyUnicode_AsUTF8AndSize(name, nullptr);
  if (!text) return nullptr;
  try {
    tk::cpu::force_isa(text);
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* release_workspace(PyObject*, PyObject*) {
  tk::Workspace::release();
  Py_RETURN_NONE;
}

PyObject* want_poison(PyObject*, PyObject* wanted) {
  const int is_wanted = PyObject_IsTrue(wanted);
  if (is_wanted < 0) return nullptr;
  tk::want_poison(is_wanted != 0);
  Py_RETURN_NONE;
}

PyObject* poisoned_bytes(PyObject*, PyObject*) { return PyLong_FromSize_t(tk::poisoned_bytes()); }

PyMethodDef methods[] = {
    {"build_info", build_info, METH_NOARGS, nullptr},
    {"cpu_features", cpu_features, METH_NOARGS, nullptr},
    {"built_isas", built_isas, METH_NOARGS, nullptr},
    {"isa", isa, METH_NOARGS, nullptr},
    {"force_isa", force_isa, METH_O, nullptr},
    {"release_workspace", release_workspace, METH_NOARGS, nullptr},
    {"want_poison", want_poison, METH_O, nullptr},
    {"poisoned_bytes", poisoned_bytes, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "_C",
    "The compiled extension. Its operators are torch.ops.transformer_kernels.*.",
    -1,  // global state: sub-interpreters cannot import it
    methods,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

// Adds a new object to the module. Returns false with an exception set if there is none.
bool add(PyObject* module, const char* name, PyObject* value) {
  const bool added = value && PyObject_SetAttrString(module, name, value) == 0;
  Py_XDECREF(value);
  return added;
}

bool add_all(PyObject* module) {
  bool added = add(module, "FIELDS", tuple_of(tk::kFields)) &&
               add(module, "LINEAR_FIELDS", tuple_of(tk::kLinearFields)) &&
               add(module, "CUDA_WIDTHS", tuple_of(tk::cuda::kWidths)) &&
               add(module, "CUDA_LINEAR_WIDTHS", tuple_of(tk::cuda::kLinearWidths)) &&
               add(module, "LARGE_SHARED_CHIPS", tuple_of(tk::cuda::kLargeSharedChips)) &&
               tk::add_direct_functions(module);
  if constexpr (kHasCuda) added = added && add(module, "cuda_functions", tk_cuda_functions());
  return added;
}

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  PyObject* const module = PyModule_Create(&definition);
  if (module && !add_all(module)) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
