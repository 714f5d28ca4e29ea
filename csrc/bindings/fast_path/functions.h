// Python functions of the CPU fast path, which bypasses torch's dispatcher.
#pragma once

#include <Python.h>

namespace tk {

// Adds direct_forward and direct_backward. Returns false with a Python exception set
// on failure.
bool add_direct_functions(PyObject* module);

}  // namespace tk
