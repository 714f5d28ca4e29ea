// Reads a ResolvedMask of masks/resolved.py: at most one constraint of each kind.
#include "common/mask.h"

#include <algorithm>

#include "bindings/fast_path/arguments.h"

namespace tk::direct {

namespace {

bool is(const dlpack::DataType& type, uint8_t code, uint8_t bits) {
  return type.code == code && type.bits == bits && type.lanes == 1;
}

// Reads None, or contiguous int64: (B) if length is negative, else (B, length).
bool read_integers(PyObject* object, const Problem& p, int64_t length, const int64_t*& to) {
  if (object == Py_None) return true;
  const int32_t dimensions = length < 0 ? 1 : 2;
  dlpack::Tensor x;
  if (!read(object, dimensions, x) || !is(x.dtype, dlpack::kInt, 64) || x.shape[0] != p.B) {
    return false;
  }
  const int64_t columns = length < 0 ? 1 : length;
  if (length >= 0 && (x.shape[1] != length || (x.strides[1] != 1 && length != 1))) return false;
  if (x.strides[0] != columns && p.B != 1) return false;
  to = static_cast<const int64_t*>(x.data);
  return true;
}

// Batch and head extents of the block mask; 1 if it does not depend on them.
struct Extent {
  int64_t B = 1, H = 1;
};

bool read_dense(PyObject* object, Problem& p, Extent& extent) {
  if (object == Py_None) return true;
  dlpack::Tensor x;
  if (!read(object, 4, x) || !is(x.dtype, dlpack::kBool, 8)) return false;
  const int64_t sizes[4] = {p.B, p.H_q, p.M, p.N};
  for (int64_t d = 0; d < 4; ++d) {
    if (x.shape[d] != 1 && x.shape[d] != sizes[d]) return false;
    p.mask.dense_stride[d] = x.shape[d] == 1 ? 0 : x.strides[d];
  }
  extent.B = std::max(extent.B, x.shape[0]);
  extent.H = std::max(extent.H, x.shape[1]);
  p.mask.dense = static_cast<const uint8_t*>(x.data);
  return true;
}

bool read_layout(PyObject* object, PyObject* block_size, Problem& p, Extent& extent) {
  if (object == Py_None) return true;
  dlpack::Tensor x;
  int64_t size;
  if (!read(object, 3, x) || !is(x.dtype, dlpack::kBool, 8) || !read_integer(block_size, size) ||
      size < 1 || (x.shape[0] != 1 && x.shape[0] != p.H_q)) {
    return false;
  }
  size = bounded_block_size(p, size);
  if (x.shape[1] != (p.M + size - 1) / size || x.shape[2] != (p.N + size - 1) / size) {
    return false;
  }
  for (int64_t d = 0; d < 3; ++d) p.mask.layout_stride[d] = x.shape[d] == 1 ? 0 : x.strides[d];
  extent.H = std::max(extent.H, x.shape[0]);
  p.mask.layout = static_cast<const uint8_t*>(x.data);
  p.mask.block_size = size;
  return true;
}

// The block mask must be contiguous, with the shape of `block_mask_shape` in backends/schema.py.
bool read_block_mask(PyObject* object, Problem& p, const Extent& extent) {
  if (!has_element_mask(p.mask)) return true;
  const auto blocks = [](int64_t n) { return (n + kBlockMaskSize - 1) / kBlockMaskSize; };
  const int64_t sizes[4] = {extent.B, extent.H, blocks(p.M), blocks(p.N)};
  dlpack::Tensor x;
  if (!read(object, 4, x) || !is(x.dtype, dlpack::kUint, 8)) return false;
  int64_t stride = 1;
  for (int64_t d = 3; d >= 0; --d) {
    if (x.shape[d] != sizes[d] || (x.strides[d] != stride && sizes[d] != 1)) return false;
    if (d < 3) p.mask.block_mask_stride[d] = sizes[d] == 1 && d < 2 ? 0 : stride;
    stride *= sizes[d];
  }
  p.mask.block_mask = static_cast<uint8_t*>(x.data);
  return true;
}

}  // namespace

bool read_mask(PyObject* const* args, Problem& p) {
  MaskParams& mask = p.mask;
  Extent extent;
  if (!read_diagonals(args, p) || !read_integers(args[2], p, -1, mask.key_start) ||
      !read_integers(args[3], p, -1, mask.key_end) ||
      !read_integers(args[4], p, p.M, mask.q_segments) ||
      !read_integers(args[5], p, p.N, mask.k_segments) ||
      (mask.q_segments == nullptr) != (mask.k_segments == nullptr)) {
    return false;
  }
  if (mask.q_segments) extent.B = p.B;
  return read_dense(args[6], p, extent) && read_layout(args[7], args[8], p, extent) &&
         read_block_mask(args[9], p, extent);
}

}  // namespace tk::direct
