// Framework-independent tensor views, from which the bindings build a Problem.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "common/params.h"

namespace tk {

// The first four are those of DType; kOther is last.
enum class Element : uint8_t {
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kBool,
  kUint8,
  kInt32,
  kInt64,
  kInt8,
  kOther,
};

// A tensor, or none. Does not own its data, sizes or strides.
struct View {
  void* data = nullptr;
  Element element = Element::kOther;
  int32_t dimensions = -1;  // -1: no tensor
  const int64_t* size = nullptr;
  const int64_t* stride = nullptr;

  explicit operator bool() const { return dimensions >= 0; }
  bool is_empty() const { return std::find(size, size + dimensions, 0) != size + dimensions; }
  bool has_size(std::initializer_list<int64_t> wanted) const {
    return std::equal(wanted.begin(), wanted.end(), size, size + std::max(dimensions, 0));
  }
};

// A tensor of up to four dimensions. Dimensions of size 1 get stride 0, so that they broadcast.
// Without elements all strides are 0: torch accepts any stride there, also one whose multiples
// overflow.
inline Strided strided(const View& x) {
  Strided s{x.data, {}};
  const bool empty = x.is_empty();
  for (int32_t d = 0; d < x.dimensions; ++d)
    s.stride[d] = empty || x.size[d] == 1 ? 0 : x.stride[d];
  return s;
}

// True if the elements of a row are adjacent, as the CUDA kernels need them.
inline bool has_adjacent_columns(const View& x) {
  return x.dimensions != 4 || x.stride[3] == 1 || x.size[3] == 1;
}

inline bool is_contiguous(const View& x) {
  int64_t stride = 1;
  for (int32_t d = x.dimensions; d-- > 0; stride *= x.size[d]) {
    if (x.size[d] != 1 && x.stride[d] != stride) return x.is_empty();
  }
  return true;
}

// Strides of a contiguous tensor of at most four dimensions, where an extent of 0 counts as 1;
// nothing if they overflow.
using Strides = std::array<int64_t, 4>;

inline std::optional<Strides> contiguous_strides(std::span<const int64_t> sizes) {
  Strides strides{};
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    if (__builtin_mul_overflow(stride, std::max<int64_t>(sizes[d], 1), &stride)) return {};
  }
  return strides;
}

// Strides of an output (B, H, L, width): the memory order of heads and sequence is that of x.
inline std::optional<Strides> output_strides(const View& x, int64_t width) {
  const int64_t B = x.size[0], H = x.size[1], L = x.size[2];
  if (x.stride[1] >= x.stride[2]) return contiguous_strides(Strides{B, H, L, width});
  auto strides = contiguous_strides(Strides{B, L, H, width});
  if (strides) std::swap((*strides)[1], (*strides)[2]);
  return strides;
}

}  // namespace tk
