// The kernels of one element type, TK_ELEMENT, and of widths TK_WIDTH and TK_V_WIDTH.
#include "cuda/sm90/launches.cuh"

namespace tk::cuda::sm90 {

template const Kernels& kernels<TK_ELEMENT, TK_WIDTH, TK_V_WIDTH>();

}  // namespace tk::cuda::sm90
