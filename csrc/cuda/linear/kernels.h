// Host interface to the kernels of linear attention of one element type and width. Plain C++.
#pragma once

#include <cstddef>

#include "common/linear_params.h"

namespace tk::cuda {

struct LinearKernels {
  size_t (*forward_workspace)(const LinearForwardParams&);
  void (*forward)(const LinearForwardParams&, void* workspace, void* stream);
  size_t (*backward_workspace)(const LinearBackwardParams&);
  void (*backward)(const LinearBackwardParams&, void* workspace, void* stream);
  void (*steps)(const LinearForwardParams&, void* stream);
};

// Each instantiation is a separate unit: kernels.cu with -DTK_ELEMENT and -DTK_WIDTH.
template <typename Element, int kWidth>
const LinearKernels& linear_kernels();

}  // namespace tk::cuda
