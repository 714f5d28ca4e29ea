// Conversion of Python objects to views and numbers, for direct calls. The readers return false,
// with no Python exception set, for anything but plain valid arguments.
#pragma once

#include <Python.h>

#include "bindings/fast_path/dlpack.h"
#include "common/options.h"

namespace tk::direct {

// Must be called first. Without torch's DLPack exchange table every call is declined.
void find_torch();

// Reads tensors of type torch.Tensor or Parameter on one device; valid as long as the tensors.
// Tensors without memory (empty, freed, sparse, transform wrappers) are declined.
class Reader {
 public:
  explicit Reader(dlpack::Device device) : device_(device) {}

  bool read(PyObject* object, View& view) const;

  // The same for an input of the caller. Declines lazy negations, which DLPack does not report.
  bool read_input(PyObject* object, View& view) const;

  // A tensor or None.
  bool read_optional(PyObject* object, View& view) const;

  // A ScoreOptions, a ResolvedMask and a Layout: `arguments` points to three objects.
  bool read_options(PyObject* const* arguments, Options& options) const;

 private:
  bool read_field(PyObject* object, Elements elements, View& to) const;

  dlpack::Device device_;
};

// The device of a tensor; type 0 for another object.
dlpack::Device device_of(PyObject* object);

}  // namespace tk::direct
