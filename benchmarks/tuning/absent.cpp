// Takes the place of a unit of kernels that a tuning library does not have. Compiled with the
// definitions of that unit.
#include <stdexcept>

#include "cuda/platform/element.h"
#ifdef TK_V_WIDTH
#include "cuda/sm90/kernels.h"
#else
#include "cuda/sm80/kernels.h"
#endif

namespace tk::cuda {

#ifdef TK_V_WIDTH
template <>
const sm90::Kernels& sm90::kernels<TK_ELEMENT, TK_WIDTH, TK_V_WIDTH>() {
#else
template <>
const Kernels& kernels<TK_ELEMENT, TK_WIDTH, Products::TK_PRODUCTS>() {
#endif
  throw std::runtime_error("this library has kernels of other widths and dtypes only");
}

}  // namespace tk::cuda
