// The Python module: functions of the extension that are not operators.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <iterator>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "bindings/fast_path/functions.h"
#include "common/fields.h"
#include "common/linear_fields.h"
#include "common/workspace.h"
#include "cpu/driver/isa_dispatch.h"
#include "cuda/common/tile_config.h"

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

// Defined by setup.py if CUDA kernels are built.
#ifdef TK_CUDA_VERSION
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
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

py::tuple rows(std::span<const tk::Field> fields) {
  py::list list;
  for (const tk::Field& x : fields) {
    list.append(py::make_tuple(x.name, x.kind, x.shape, x.layouts));
  }
  return py::tuple(list);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "The compiled extension. Its operators are torch.ops.transformer_kernels.*.";
  module.def("build_info", &build_info);
  module.def("cpu_features", &cpu_features);
  module.def("built_isas", &tk::cpu::built_isas);
  module.def("isa", &tk::cpu::isa);
  module.def("force_isa", &tk::cpu::force_isa, py::arg("name"), py::pos_only());
  module.attr("FIELDS") = rows(tk::kFields);
  module.attr("LINEAR_FIELDS") = rows(tk::kLinearFields);
  module.attr("CUDA_WIDTHS") = py::tuple(py::cast(std::to_array(tk::cuda::kWidths)));
  module.attr("CUDA_LINEAR_WIDTHS") = py::tuple(py::cast(std::to_array(tk::cuda::kLinearWidths)));
  module.attr("LARGE_SHARED_CHIPS") =
      py::tuple(py::cast(std::to_array(tk::cuda::kLargeSharedChips)));
  module.def("release_workspace", &tk::Workspace::release);
  module.def("want_poison", &tk::want_poison, py::arg("wanted"), py::pos_only());
  module.def("poisoned_bytes", &tk::poisoned_bytes);
  if (!tk::add_direct_functions(module.ptr())) throw py::error_already_set();
  if constexpr (kHasCuda) {
    module.attr("cuda_functions") = py::reinterpret_steal<py::tuple>(tk_cuda_functions());
  }
}
