// Explicit instantiation of the kernels of linear attention for element type TK_ELEMENT and width
// TK_WIDTH.
#include "cuda/linear/launches.cuh"

namespace tk::cuda {

template const LinearKernels& linear_kernels<TK_ELEMENT, TK_WIDTH>();

}  // namespace tk::cuda
