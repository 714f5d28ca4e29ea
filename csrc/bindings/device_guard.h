// Device guard of the CUDA operators: a CUDA device, or the emulator on the CPU with TK_EMULATOR.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <vector>

#include "bindings/namespace.h"
#include "bindings/operator_call.h"
#include "cuda/dispatch.h"

#ifdef TK_EMULATOR
#include "cuda/emulator/core.h"
#else
// Weak: a CPU-only torch lacks this symbol, but has no CUDA tensors that could lead here.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);
#endif

// TK_CUDA_OPERATORS(m) { m.impl(...); }
#ifdef TK_EMULATOR
#define TK_CUDA_OPERATORS(m) TK_IMPLEMENT(TK_LIBRARY, CPU, m)
#else
#define TK_CUDA_OPERATORS(m) TK_IMPLEMENT(TK_LIBRARY, CUDA, m)
#endif

namespace tk::cuda {

#ifdef TK_EMULATOR

class OnDevice {
 public:
  explicit OnDevice(const Device& device) {
    STD_TORCH_CHECK(device.is_cpu(), "the emulator runs on the CPU");
  }
  ~OnDevice() {
    emulator::options().ordered_sums = false;
    emulator::options().global.clear();
  }

  void* stream() const { return nullptr; }

  // For the race detector: an access outside these tensors is reported, and in a `deterministic`
  // call an accumulation in unspecified order.
  void declare_accesses(const std::vector<Optional>& tensors, bool deterministic) const {
    if (!emulator::options().races) return;
    emulator::options().ordered_sums = deterministic;
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
    emulator::options().global.push_back({x->data_ptr(), bytes});
  }
};

#else

// Sets the current device, and holds its current stream.
class OnDevice {
 public:
  explicit OnDevice(const Device& device) : guard_(checked(device).index) {
    use_device(device.index);
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &stream_));
  }

  void* stream() const { return stream_; }

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

#endif

// Kernels need a unit last stride: returns x, or a contiguous copy.
inline Tensor as_rows(const Tensor& x) {
  const bool unit_stride = x.dim() != 4 || x.stride(3) == 1 || x.size(3) == 1;
  return unit_stride ? x : checked_contiguous(x);
}

// May be freed while kernels still use it: torch's allocator reuses it in stream order.
inline Tensor workspace(size_t bytes, const Device& device) {
  const std::array<int64_t, 1> size{static_cast<int64_t>(bytes)};
  return empty(size, ScalarType::Byte, device);
}

}  // namespace tk::cuda
