// Python functions of the fast paths, which bypass torch's dispatcher.
#pragma once

#include <Python.h>

namespace tk {

// Adds direct_forward and direct_backward, of the CPU kernels. Returns false with a Python
// exception set on failure.
bool add_direct_functions(PyObject* module);

}  // namespace tk

// Those of the CUDA kernels, in bindings/cuda_fast_path.cpp: a new tuple (forward, backward), or
// null with a Python exception set.
extern "C" PyObject* tk_cuda_functions();
