// Explicit instantiation of the kernels for element type TK_ELEMENT and width TK_WIDTH.
#include "cuda/sm80/launches.cuh"

namespace tk::cuda {

template const Kernels& kernels<TK_ELEMENT, TK_WIDTH>();

}  // namespace tk::cuda
