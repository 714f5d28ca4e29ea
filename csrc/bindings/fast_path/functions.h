// Python functions that run the kernels past torch's dispatcher.
#pragma once

#include <Python.h>

namespace tk {

// Adds `direct_forward` and `direct_backward`. False with a Python exception set if it cannot.
bool add_direct_functions(PyObject* module);

}  // namespace tk
