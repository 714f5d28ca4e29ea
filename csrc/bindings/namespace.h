// The namespace of the operators in torch.ops. Another library that is loaded beside the package
// has another one: building/hub.py, building/emulated.py.
#pragma once

#include <torch/csrc/stable/library.h>

#ifndef TK_LIBRARY
#define TK_LIBRARY transformer_kernels
#endif

// Indirection, so that TK_LIBRARY is expanded before it is stringified.
#define TK_DEFINE(library, m) STABLE_TORCH_LIBRARY(library, m)
#define TK_DEFINE_MORE(library, m) STABLE_TORCH_LIBRARY_FRAGMENT(library, m)
#define TK_IMPLEMENT(library, key, m) STABLE_TORCH_LIBRARY_IMPL(library, key, m)
