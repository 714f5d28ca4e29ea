// Host interface to the kernels of one element type, width and kind of products. Plain C++.
#pragma once

#include <cstddef>

#include "common/params.h"
#include "cuda/common/launch_args.h"
#include "cuda/common/tile_config.h"

namespace tk::cuda {

// The last four are null for relative keys: sm90 and decode kernels do not have them.
struct Kernels {
  void (*forward)(const ForwardParams&, const LaunchArgs&);
  size_t (*backward_workspace)(const BackwardParams&, const LaunchArgs&);
  void (*backward)(const BackwardParams&, const LaunchArgs&, void* workspace, bool deterministic);
  // Computes only dbias and drelative_bias; used when sm90 kernels compute dq, dk and dv.
  size_t (*bias_gradients_workspace)(const BackwardParams&, const LaunchArgs&);
  void (*bias_gradients)(const BackwardParams&, const LaunchArgs&, void* workspace);
  size_t (*decode_workspace)(const ForwardParams&);
  void (*decode)(const ForwardParams&, const KVCache&, void* workspace, void* stream);
};

// Each instantiation is a separate unit: kernels.cu with -DTK_ELEMENT, -DTK_WIDTH and
// -DTK_PRODUCTS.
template <typename Element, int kWidth, Products kProducts>
const Kernels& kernels();

}  // namespace tk::cuda
