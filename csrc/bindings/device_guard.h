// Device guard of the CUDA operators.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <vector>

#include "bindings/namespace.h"
#include "bindings/tensors.h"
#include "cuda/dispatch.h"

// Weak: a CPU-only torch lacks this symbol, but has no CUDA tensors that could lead here.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

// TK_CUDA_OPERATORS(m) { m.impl(...); }
#define TK_CUDA_OPERATORS(m) TK_IMPLEMENT(TK_LIBRARY, CUDA, m)

namespace tk::cuda {

// Sets the current device, and holds its current stream.
class OnDevice {
 public:
  explicit OnDevice(const Device& device) : guard_(checked(device).index) {
    use_device(device.index);
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &stream_));
  }

  explicit OnDevice(int64_t index)
      : OnDevice(Device{aoti_torch_device_type_cuda(), static_cast<int32_t>(index)}) {}

  void* stream() const { return stream_; }

  // The tensors that kernels may access, and whether their sums must have a specified order; a GPU
  // does not check either.
  void declare_accesses(const std::vector<Optional>&, bool) const {}

 private:
  static const Device& checked(const Device& device) {
    STD_TORCH_CHECK(device.type == aoti_torch_device_type_cuda(),
                    "the tensors must be on a CUDA device");
    return device;
  }

  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

}  // namespace tk::cuda
