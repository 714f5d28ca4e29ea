// The kernels of one element type, TK_ELEMENT, and one width, TK_WIDTH.
#include "cuda/sm80/launches.cuh"

namespace tk::cuda {

template const Kernels& kernels<TK_ELEMENT, TK_WIDTH>();

}  // namespace tk::cuda
