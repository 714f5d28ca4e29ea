// Selects the Hopper kernels for a problem by element type and width.
#include <cstdlib>
#include <iterator>
#include <string>
#include <utility>

#include "cuda/platform/element.h"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/supported.h"

namespace tk::cuda::sm90 {

namespace {

template <typename Element, size_t... kIndex>
const Kernels* kernels_of(Widths widths, std::index_sequence<kIndex...>) {
  const Kernels* found = nullptr;
  const auto consider = [&]<Widths kTile>() {
    if (widths.width == kTile.width) found = &kernels<Element, kTile.width, kTile.v_width>();
  };
  (consider.template operator()<kHopperWidths[kIndex]>(), ...);
  return found;
}

const Kernels* kernels_of(DType dtype, Widths widths) {
  constexpr auto kEach = std::make_index_sequence<std::size(kHopperWidths)>();
  return dtype == DType::kFloat16 ? kernels_of<Half>(widths, kEach)
                                  : kernels_of<BFloat16>(widths, kEach);
}

}  // namespace

bool is_wanted() {
  static const bool wanted = [] {
    const char* const setting = std::getenv("TRANSFORMER_KERNELS_HOPPER");
    return !setting || std::string(setting) != "0";
  }();
  return wanted;
}

const Kernels* kernels_for(const ForwardParams& p) {
  return reason_against(p) ? nullptr : kernels_of(p.dtype, widths_of(p));
}

const Kernels* kernels_for(const BackwardParams& p) {
  return reason_against(p) ? nullptr : kernels_of(p.dtype, widths_of(p));
}

}  // namespace tk::cuda::sm90
