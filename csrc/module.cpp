// The Python module: everything about the extension that is not an operator.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "direct.h"
#include "memory.h"

namespace py = pybind11;

namespace {

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown";
#endif
}

// Empty where CUDA kernels are not built; setup.py defines them otherwise.
#ifndef TK_CUDA_VERSION
#define TK_CUDA_VERSION ""
#define TK_CUDA_ARCHITECTURES ""
#endif

std::vector<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

py::dict build_info() {
  py::dict info;
  info["compiler"] = compiler();
  info["cxx_standard"] = "C++" + std::to_string(__cplusplus / 100 % 100);
  info["torch"] = TK_TORCH_VERSION;
  info["minimum_torch"] = TK_MINIMUM_TORCH_VERSION;
  info["isas"] = tk::cpu::built_isas();
  info["cuda"] = TK_CUDA_VERSION;
  info["cuda_architectures"] = words(TK_CUDA_ARCHITECTURES);
  return info;
}

py::dict cpu_features() {
  py::dict features;
  for (const auto& feature : tk::cpu::cpu_features()) features[feature.name] = feature.present;
  return features;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "The compiled extension. Its operators are torch.ops.transformer_kernels.*.";
  module.def("build_info", &build_info);
  module.def("cpu_features", &cpu_features);
  module.def("built_isas", &tk::cpu::built_isas);
  module.def("isa", &tk::cpu::isa);
  module.def("force_isa", &tk::cpu::force_isa, py::arg("name"), py::pos_only());
  module.def("release_workspace", &tk::Workspace::release);
  module.def("want_poison", &tk::want_poison, py::arg("wanted"), py::pos_only());
  module.def("poisoned_bytes", &tk::poisoned_bytes);
  if (!tk::add_direct_functions(module.ptr())) throw py::error_already_set();
}
