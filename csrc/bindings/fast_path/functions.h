// Python functions of the CPU fast path, which bypasses torch's dispatcher.
#pragma once

#include <Python.h>

namespace tk {

// Adds direct_forward, direct_backward and direct_decode. Returns false with a Python exception set
// on failure.
bool add_direct_functions(PyObject* module);

}  // namespace tk
