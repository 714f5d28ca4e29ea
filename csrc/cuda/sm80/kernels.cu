// Explicit instantiation of the kernels for element type TK_ELEMENT, width TK_WIDTH and products
// TK_PRODUCTS.
#include "cuda/sm80/launches.cuh"

namespace tk::cuda {

template const Kernels& kernels<TK_ELEMENT, TK_WIDTH, Products::TK_PRODUCTS>();

}  // namespace tk::cuda
