// Device guard of the emulated operators, which run on the CPU.
#pragma once

#include <vector>

#include "bindings/namespace.h"
#include "bindings/tensors.h"
#include "emulator/core.h"

#define TK_CUDA_OPERATORS(m) TK_IMPLEMENT(TK_LIBRARY, CPU, m)

namespace tk::cuda {

class OnDevice {
 public:
  explicit OnDevice(const Device& device) {
    STD_TORCH_CHECK(device.is_cpu(), "the emulator runs on the CPU");
  }
  explicit OnDevice(int64_t /*index*/) {}
  ~OnDevice() {
    emulator::settings().ordered_sums = false;
    emulator::settings().global.clear();
  }

  void* stream() const { return nullptr; }

  // For the race detector: an access outside these tensors is reported, and in a `deterministic`
  // call an accumulation in unspecified order.
  void declare_accesses(const std::vector<Optional>& tensors, bool deterministic) const {
    if (!emulator::settings().races) return;
    emulator::settings().ordered_sums = deterministic;
    for (const Optional& x : tensors) declare_access(x);
  }

 private:
  static void declare_access(const Optional& x) {
    if (!x || x->numel() == 0) return;
    int32_t dtype;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x->get(), &dtype));
    int64_t elements = 1;
    for (int64_t d = 0; d < x->dim(); ++d) elements += (x->size(d) - 1) * x->stride(d);
    const size_t bytes = static_cast<size_t>(elements) * aoti_torch_dtype_element_size(dtype);
    emulator::settings().global.push_back({x->data_ptr(), bytes});
  }
};

}  // namespace tk::cuda
