// Host interface of the Hopper kernels. Plain C++.
#pragma once

#include <cstddef>

#include "common/params.h"
#include "cuda/common/launch_args.h"

namespace tk::cuda::sm90 {

struct Kernels {
  size_t forward_workspace;
  void (*forward)(const ForwardParams&, const LaunchArgs&, void* workspace);
  size_t (*backward_workspace)(const BackwardParams&, const LaunchArgs&);
  void (*backward)(const BackwardParams&, const LaunchArgs&, void* workspace, bool deterministic);
};

// Kernels of one element type, for widths of q and v up to kWidth and kVWidth. Each instantiation
// is a separate compilation of kernels.cu with -DTK_ELEMENT, -DTK_WIDTH and -DTK_V_WIDTH.
template <typename Element, int kWidth, int kVWidth>
const Kernels& kernels();

// False if the environment variable TRANSFORMER_KERNELS_HOPPER is 0.
bool is_wanted();

// The kernels for a problem; null if they do not support it (supported.h).
const Kernels* kernels_for(const ForwardParams& p);
const Kernels* kernels_for(const BackwardParams& p);

}  // namespace tk::cuda::sm90
