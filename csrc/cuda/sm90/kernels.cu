// Explicit instantiation for element type TK_ELEMENT and widths TK_WIDTH (q, k) and TK_V_WIDTH (v).
#include "cuda/sm90/launches.cuh"

namespace tk::cuda::sm90 {

template const Kernels& kernels<TK_ELEMENT, TK_WIDTH, TK_V_WIDTH>();

}  // namespace tk::cuda::sm90
