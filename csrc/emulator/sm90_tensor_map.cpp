// Encoding of TMA descriptors. Not in the header, because units of kernels may be compiled with
// -fsanitize=thread, which must not instrument the emulator's own strings.
#include "cuda/platform/sm90_tensor_map.h"

#include <stdexcept>
#include <string>

namespace tk::cuda {

TensorMap encode(const TensorBox& tensor) {
  const auto require = [](bool valid, const std::string& what) {
    if (!valid) throw std::runtime_error("tensor map: " + what);
  };
  const auto text = [](uint64_t number) { return std::to_string(number); };
  const size_t element = element_bytes(tensor.type);
  require(tensor.rank >= 1 && tensor.rank <= kTensorRank,
          "rank " + std::to_string(tensor.rank) + "; expected 1 to 5");
  require(reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0,
          "the data address is not a multiple of 16");
  for (int n = 0; n < tensor.rank; ++n) {
    const std::string dimension = " of dimension " + std::to_string(n);
    require(tensor.size[n] >= 1 && tensor.size[n] <= uint64_t{1} << 32,
            "size " + text(tensor.size[n]) + dimension);
    require(tensor.box[n] >= 1 && tensor.box[n] <= 256, "box " + text(tensor.box[n]) + dimension);
    require(n == 0 || (tensor.stride[n] % 16 == 0 && tensor.stride[n] < uint64_t{1} << 40),
            "stride " + text(tensor.stride[n]) + dimension);
  }
  const size_t row = tensor.box[0] * element, swizzled = 16 * swizzle_chunks(tensor.swizzle);
  require(row % 16 == 0, "rows of " + text(row) + " bytes; must be a multiple of 16");
  require(tensor.swizzle == Swizzle::kNone || row == swizzled,
          "rows of " + text(row) + " bytes, swizzled by " + text(swizzled));
  // 64-bit fields first. A box size is at most 256, so one byte holds the size minus one.
  TensorMap map{};
  map.words[0] = reinterpret_cast<uint64_t>(tensor.data);
  uint64_t boxes = 0;
  for (int n = 0; n < tensor.rank; ++n) {
    map.words[1 + n] = tensor.size[n];
    map.words[6 + n] = tensor.stride[n];
    boxes |= static_cast<uint64_t>(tensor.box[n] - 1) << 8 * n;
  }
  map.words[11] = boxes;
  map.words[12] = static_cast<uint64_t>(tensor.rank) | static_cast<uint64_t>(tensor.type) << 8 |
                  static_cast<uint64_t>(tensor.swizzle) << 16;
  map.words[15] = 0x746b2d6d61702121;  // marks a valid map
  return map;
}

TensorBox decode(const TensorMap& map) {
  TensorBox tensor{};
  if (map.words[15] != 0x746b2d6d61702121) return tensor;
  tensor.data = reinterpret_cast<void*>(map.words[0]);
  tensor.rank = static_cast<int>(map.words[12] & 0xff);
  tensor.type = static_cast<TensorType>(map.words[12] >> 8 & 0xff);
  tensor.swizzle = static_cast<Swizzle>(map.words[12] >> 16 & 0xff);
  for (int n = 0; n < tensor.rank; ++n) {
    tensor.size[n] = map.words[1 + n];
    tensor.stride[n] = map.words[6 + n];
    tensor.box[n] = static_cast<uint32_t>(map.words[11] >> 8 * n & 0xff) + 1;
  }
  return tensor;
}

}  // namespace tk::cuda
