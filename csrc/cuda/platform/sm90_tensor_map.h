// TMA tensor maps, which the driver encodes.
#pragma once

#include <cuda.h>

#include <stdexcept>
#include <string>

#include "cuda/platform/device.h"
#include "cuda/platform/tensor_box.h"

namespace tk::cuda {

// Passed to kernels by value as `const __grid_constant__`, alone or as a member of another struct.
struct alignas(128) TensorMap {
  uint64_t words[16];
};

// Encodes a tensor map. Throws std::runtime_error on failure. The driver function is looked up at
// run time, so that the extension does not link libcuda.
inline TensorMap encode(const TensorBox& tensor) {
  static const auto driver_encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    constexpr char kName[] = "cuTensorMapEncodeTiled";
#if CUDART_VERSION >= 12050
    check(cudaGetDriverEntryPointByVersion(kName, &entry, 12000, cudaEnableDefault, &found), kName);
#else
    check(cudaGetDriverEntryPoint(kName, &entry, cudaEnableDefault, &found), kName);
#endif
    if (found != cudaDriverEntryPointSuccess) {
      throw std::runtime_error(
          "the CUDA driver has no cuTensorMapEncodeTiled: it is older than 12.0");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  constexpr CUtensorMapDataType kTypes[] = {CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                            CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                            CU_TENSOR_MAP_DATA_TYPE_FLOAT32};
  constexpr CUtensorMapSwizzle kSwizzles[] = {CU_TENSOR_MAP_SWIZZLE_NONE,
                                              CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_SWIZZLE_64B,
                                              CU_TENSOR_MAP_SWIZZLE_32B};
  constexpr uint32_t kEveryElement[kTensorRank] = {1, 1, 1, 1, 1};
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  static_assert(alignof(TensorMap) >= alignof(CUtensorMap));
  TensorMap map;
  const CUresult result = driver_encode(
      reinterpret_cast<CUtensorMap*>(&map), kTypes[static_cast<int>(tensor.type)],
      static_cast<uint32_t>(tensor.rank), tensor.data, tensor.size, tensor.stride + 1, tensor.box,
      kEveryElement, CU_TENSOR_MAP_INTERLEAVE_NONE, kSwizzles[static_cast<int>(tensor.swizzle)],
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled failed with error " + std::to_string(result));
  }
  return map;
}

}  // namespace tk::cuda
