// The kernels for Hopper, as the host calls them; plain C++.
#pragma once

#include <cstddef>

#include "common/params.h"
#include "cuda/common/call.h"

namespace tk::cuda::sm90 {

struct Kernels {
  void (*forward)(const ForwardParams&, const Call&);
  size_t (*backward_workspace)(const BackwardParams&, const Call&);
  void (*backward)(const BackwardParams&, const Call&, void* workspace, bool deterministic);
};

// Those of one element type, and of rows of q and of v of at most so many elements. Each is
// compiled by itself, from kernels.cu with -DTK_ELEMENT, -DTK_WIDTH and -DTK_V_WIDTH.
template <typename Element, int kWidth, int kVWidth>
const Kernels& kernels();

// Whether the environment leaves them their work.
bool is_wanted();

// Null where these kernels do not take the pass.
const Kernels* kernels_for(const ForwardParams& p);
const Kernels* kernels_for(const BackwardParams& p);

}  // namespace tk::cuda::sm90
