// The kernels for a problem that Hopper's take.
#include <cstdlib>
#include <string>

#include "../element.h"
#include "kernels.h"
#include "takes.h"

namespace tk::cuda::sm90 {

namespace {

template <typename Element>
const Kernels* kernels_of(Widths widths) {
  switch (widths.width) {
    case 64:
      return &kernels<Element, 64, 64>();
    case 128:
      return &kernels<Element, 128, 128>();
    case 192:
      return &kernels<Element, 192, 128>();
    case 256:
      return &kernels<Element, 256, 256>();
    default:
      return nullptr;
  }
}

const Kernels* kernels_of(DType dtype, Widths widths) {
  return dtype == DType::kFloat16 ? kernels_of<Half>(widths) : kernels_of<BFloat16>(widths);
}

}  // namespace

bool is_wanted() {
  static const bool wanted = [] {
    const char* const told = std::getenv("TRANSFORMER_KERNELS_HOPPER");
    return !told || std::string(told) != "0";
  }();
  return wanted;
}

const Kernels* kernels_for(const ForwardParams& p) {
  return kernels_of(p.dtype, forward_widths(p));
}

const Kernels* kernels_for(const BackwardParams& p) {
  return kernels_of(p.dtype, backward_widths(p));
}

}  // namespace tk::cuda::sm90
