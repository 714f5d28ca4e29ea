// Conversion of Python objects to views and numbers, for the CPU fast path. The readers return
// false, with no Python exception set, for anything but plain valid arguments.
#pragma once

#include <Python.h>

#include "common/options.h"

namespace tk::direct {

// Must be called first. Without torch's DLPack exchange table every call is declined.
void find_torch();

// Reads a CPU tensor of type torch.Tensor or Parameter; valid as long as the tensor. Tensors
// without memory (empty, freed, sparse, transform wrappers) are declined.
bool read(PyObject* object, View& view);

// The same for an input of the caller. Declines lazy negations, which DLPack does not report.
bool read_input(PyObject* object, View& view);

// A tensor or None.
bool read_optional(PyObject* object, View& view);

// A ScoreOptions, a ResolvedMask and a Layout: `arguments` points to three objects.
bool read_options(PyObject* const* arguments, Options& options);

}  // namespace tk::direct
