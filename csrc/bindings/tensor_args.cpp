#include "bindings/tensor_args.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <utility>

#include "common/mask.h"
#include "common/workspace.h"

namespace tk {

namespace {

DType dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    default:
      STD_TORCH_CHECK(false, "attention supports float16, bfloat16, float32 and float64");
  }
}

const int32_t* starts(const Tensor& cu_seqlens, int64_t count, const Device& device) {
  STD_TORCH_CHECK(cu_seqlens.scalar_type() == ScalarType::Int && is_on(cu_seqlens, device) &&
                      cu_seqlens.dim() == 1 && cu_seqlens.size(0) == count && count > 0,
                  "cu_seqlens must be two int32 vectors of equal length, at least 1");
  return static_cast<const int32_t*>(data_of(cu_seqlens));
}

int64_t mask_blocks(int64_t length) { return (length + kBlockMaskSize - 1) / kBlockMaskSize; }

// Allocates the block mask (B or 1, H_q or 1, row blocks, column blocks); an extent is 1 if the
// mask does not depend on it. Empty if the mask has only diagonals and key ranges. Same shape as
// `block_mask_shape` in backends/schema.py.
Tensor empty_block_mask(const AttentionArgs& args) {
  const Problem& p = args.problem;
  if (!has_element_mask(p.mask)) {
    return empty(std::array<int64_t, 1>{0}, ScalarType::Byte, args.device);
  }
  int64_t B = args.q_segments ? p.B : 1, H = 1;
  if (args.dense) {
    B = std::max(B, args.dense->size(0));
    H = std::max(H, args.dense->size(1));
  }
  if (args.layout) H = std::max(H, args.layout->size(0));
  return empty(std::array<int64_t, 4>{B, H, mask_blocks(p.M), mask_blocks(p.N)}, ScalarType::Byte,
               args.device);
}

void use_block_mask(AttentionArgs& args, const Tensor& block_mask) {
  if (!has_element_mask(args.problem.mask)) return;
  const Problem& p = args.problem;
  STD_TORCH_CHECK(block_mask.dim() == 4 && block_mask.scalar_type() == ScalarType::Byte &&
                      is_on(block_mask, args.device) && block_mask.is_contiguous() &&
                      (block_mask.size(0) == 1 || block_mask.size(0) == p.B) &&
                      (block_mask.size(1) == 1 || block_mask.size(1) == p.H_q) &&
                      block_mask.size(2) == mask_blocks(p.M) &&
                      block_mask.size(3) == mask_blocks(p.N),
                  "the block mask must be that of a forward pass, on the device of q");
  MaskParams& mask = args.problem.mask;
  mask.block_mask = static_cast<uint8_t*>(data_of(block_mask));
  const int64_t rows = block_mask.size(2), columns = block_mask.size(3);
  mask.block_mask_stride[0] = block_mask.size(0) == 1 ? 0 : block_mask.size(1) * rows * columns;
  mask.block_mask_stride[1] = block_mask.size(1) == 1 ? 0 : rows * columns;
  mask.block_mask_stride[2] = columns;
}

bool has_sizes(const Tensor& x, std::initializer_list<int64_t> sizes) {
  return std::ranges::equal(x.sizes(), sizes);
}

// At most four dimensions; an extent of 0 counts as 1.
std::array<int64_t, 4> contiguous_strides(std::span<const int64_t> sizes) {
  std::array<int64_t, 4> strides{};
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    STD_TORCH_CHECK(!__builtin_mul_overflow(stride, std::max<int64_t>(sizes[d], 1), &stride),
                    "cannot allocate memory for a result of 2^63 elements or more");
  }
  return strides;
}

// Returns lse or dlse, contiguous.
Tensor statistics(const Tensor& x, const Problem& p, ScalarType dtype, const Device& device) {
  STD_TORCH_CHECK(has_sizes(x, {p.B, p.H_q, p.M}) && x.scalar_type() == dtype && is_on(x, device),
                  "lse and dlse must be (B, H_q, M), in the dtype of the forward pass's lse");
  return checked_contiguous(x);
}

}  // namespace

bool Device::is_cpu() const { return type == aoti_torch_device_type_cpu(); }

Device device_of(const Tensor& x) {
  Device device{};
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device.type));
  if (!device.is_cpu()) device.index = x.get_device_index();
  return device;
}

bool is_on(const Tensor& x, const Device& device) {
  const Device own = device_of(x);
  return own.type == device.type && own.index == device.index;
}

void* data_of(const Tensor& x) {
  void* const data = x.data_ptr();
  if (x.numel() == 0) return data;
  int64_t last = x.storage_offset(), bytes;
  for (int64_t d = 0; d < x.dim(); ++d) last += (x.size(d) - 1) * x.stride(d);
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(x.get(), &bytes));
  STD_TORCH_CHECK(bytes / static_cast<int64_t>(x.element_size()) > last,
                  "the storage of a tensor argument is smaller than the tensor: it was freed");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(data) % x.element_size() == 0,
                  "the memory of a tensor argument is not aligned to its elements");
  return data;
}

View view(const Tensor& x, const Device& device) {
  STD_TORCH_CHECK(x.dim() == 4 && is_on(x, device), "expected a 4-D tensor on the device of q");
  return {data_of(x), dtype_of(x), x.sizes().data(), x.strides().data()};
}

Strided strided(const Tensor& x, const Device& device) { return strided(view(x, device)); }

const int64_t* integers(const Tensor& x, std::initializer_list<int64_t> shape,
                        const Device& device) {
  bool fits = x.scalar_type() == ScalarType::Long && is_on(x, device) && x.is_contiguous() &&
              x.dim() == static_cast<int64_t>(shape.size());
  int64_t d = 0;
  for (const int64_t size : shape) fits = fits && x.size(d++) == size;
  STD_TORCH_CHECK(fits, "an integer tensor of the mask does not fit the problem");
  return static_cast<const int64_t*>(data_of(x));
}

const uint8_t* booleans(const Tensor& x, int64_t dimensions, const Device& device) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Bool && is_on(x, device) && x.dim() == dimensions,
                  "a bool tensor of the mask does not fit the problem");
  return static_cast<const uint8_t*>(data_of(x));
}

Tensor checked_contiguous(const Tensor& x) {
  data_of(x);
  return torch::stable::contiguous(x);
}

Optional checked_contiguous(const Optional& x) { return x ? Optional(checked_contiguous(*x)) : x; }

ScalarType statistics_dtype(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Calls torch's C function directly: an allocation through the dispatcher takes three times as
// long.
Tensor empty_strided(std::span<const int64_t> sizes, std::span<const int64_t> strides,
                     ScalarType dtype, const Device& device) {
  AtenTensorHandle handle;
  const AOTITorchError error = aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), device.type,
      device.index, &handle);
  STD_TORCH_CHECK(error == AOTI_TORCH_SUCCESS, "cannot allocate memory for a result");
  const Tensor x(handle);
  if (device.is_cpu()) {
    int64_t bytes;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(handle, &bytes));
    expect_writes(x.data_ptr(), static_cast<size_t>(bytes));
    poison(x.data_ptr(), static_cast<size_t>(bytes));
  }
  return x;
}

Tensor empty(std::span<const int64_t> sizes, ScalarType dtype, const Device& device) {
  const std::array<int64_t, 4> strides = contiguous_strides(sizes);
  return empty_strided(sizes, std::span(strides).first(sizes.size()), dtype, device);
}

Tensor empty_like_layout(const Tensor& x, int64_t width, const Device& device) {
  const int64_t H = x.size(1), L = x.size(2);
  const std::array<int64_t, 4> sizes{x.size(0), H, L, width};
  if (x.stride(1) >= x.stride(2)) return empty(sizes, x.scalar_type(), device);
  const auto [entry, row, head, column] =
      contiguous_strides(std::array<int64_t, 4>{sizes[0], L, H, width});
  const std::array<int64_t, 4> strides{entry, head, row, column};
  return empty_strided(sizes, strides, x.scalar_type(), device);
}

AttentionArgs::AttentionArgs(const Tensor& q, const Tensor& k, const Tensor& v, TK_OPTIONS)
    : device(device_of(q)),
      key_start(checked_contiguous(key_start)),
      key_end(checked_contiguous(key_end)),
      q_segments(checked_contiguous(q_segments)),
      k_segments(checked_contiguous(k_segments)),
      dense(std::move(dense)),
      layout(std::move(layout)),
      cu_seqlens_q(checked_contiguous(cu_seqlens_q)),
      cu_seqlens_k(checked_contiguous(cu_seqlens_k)) {
  STD_TORCH_CHECK(set_tensors(problem, view(q, device), view(k, device), view(v, device)),
                  "q, k and v do not fit together");
  set_mask(diagonal_low, diagonal_high, block_size);
  problem.score.scale = scale;
  problem.score.softcap = softcap;
  problem.score.alibi_offset = std::clamp(alibi_offset, -kUnbounded, kUnbounded);
  set_scores(bias, alibi_slopes);
  set_dropout(dropout_p, seed);
  const bool packed = this->cu_seqlens_q.has_value();
  this->max_seqlen_q = packed ? std::clamp<int64_t>(max_seqlen_q, 0, problem.M) : problem.M;
  this->max_seqlen_k = packed ? std::clamp<int64_t>(max_seqlen_k, 0, problem.N) : problem.N;
  set_varlen(bottom_right);
}

void AttentionArgs::set_mask(int64_t low, int64_t high, int64_t block_size) {
  const Problem& p = problem;
  MaskParams& mask = problem.mask;
  mask.diagonal_low = std::clamp(low, -kUnbounded, kUnbounded);
  mask.diagonal_high = std::clamp(high, -kUnbounded, kUnbounded);
  if (key_start) mask.key_start = integers(*key_start, {p.B}, device);
  if (key_end) mask.key_end = integers(*key_end, {p.B}, device);
  STD_TORCH_CHECK(q_segments.has_value() == k_segments.has_value(),
                  "q_segments and k_segments must be given together");
  if (q_segments) {
    mask.q_segments = integers(*q_segments, {p.B, p.M}, device);
    mask.k_segments = integers(*k_segments, {p.B, p.N}, device);
  }
  if (dense) {
    mask.dense = booleans(*dense, 4, device);
    const int64_t sizes[4] = {p.B, p.H_q, p.M, p.N};
    for (int64_t d = 0; d < 4; ++d) {
      const int64_t size = dense->size(d);
      STD_TORCH_CHECK(size == 1 || size == sizes[d],
                      "the dense mask does not broadcast to (B, H_q, M, N)");
      mask.dense_stride[d] = size == 1 ? 0 : dense->stride(d);
    }
  }
  if (layout) {
    mask.layout = booleans(*layout, 3, device);
    const int64_t size = bounded_block_size(p, block_size);
    mask.block_size = size;
    STD_TORCH_CHECK(size > 0 && layout->size(1) >= (p.M + size - 1) / size &&
                        layout->size(2) >= (p.N + size - 1) / size &&
                        (layout->size(0) == 1 || layout->size(0) == p.H_q),
                    "the layout does not fit the problem");
    for (int64_t d = 0; d < 3; ++d) mask.layout_stride[d] = layout->stride(d);
    if (layout->size(0) == 1) mask.layout_stride[0] = 0;
  }
}

void AttentionArgs::set_scores(const Optional& bias, const Optional& slopes) {
  Problem& p = problem;
  if (bias) {
    const View x = view(*bias, device);
    p.score.bias = strided(x);
    p.score.bias_dtype = x.dtype;
    const int64_t sizes[4] = {p.B, p.H_q, p.M, p.N};
    for (int64_t d = 0; d < 4; ++d) {
      STD_TORCH_CHECK(x.size[d] == 1 || x.size[d] == sizes[d],
                      "the bias does not broadcast to (B, H_q, M, N)");
    }
  }
  if (slopes) {
    const bool double_wanted = p.dtype == DType::kFloat64;
    STD_TORCH_CHECK(
        slopes->dim() == 1 && slopes->size(0) == p.H_q && is_on(*slopes, device) &&
            slopes->scalar_type() == (double_wanted ? ScalarType::Double : ScalarType::Float),
        "the ALiBi slopes do not fit the problem");
    owned.push_back(checked_contiguous(*slopes));
    p.score.alibi_slopes = owned.back().data_ptr();
  }
}

void AttentionArgs::set_dropout(double p, const Optional& given) {
  problem.dropout.p = p;
  STD_TORCH_CHECK(p >= 0 && p <= 1, "dropout_p must be between 0 and 1");
  STD_TORCH_CHECK(p == 0 || given, "dropout needs a seed");
  if (!given) return;
  STD_TORCH_CHECK(
      given->scalar_type() == ScalarType::Long && given->numel() == 1 && is_on(*given, device),
      "the seed must be one int64, on the device of q");
  owned.push_back(*given);
  seed = static_cast<const int64_t*>(data_of(*given));
}

void AttentionArgs::set_varlen(bool bottom_right) {
  STD_TORCH_CHECK(cu_seqlens_q.has_value() == cu_seqlens_k.has_value(),
                  "cu_seqlens_q and cu_seqlens_k must be given together");
  if (!cu_seqlens_q) return;
  const int64_t count = cu_seqlens_q->numel();
  varlen = {count - 1, starts(*cu_seqlens_q, count, device), starts(*cu_seqlens_k, count, device),
            bottom_right};
  const Problem& p = problem;
  STD_TORCH_CHECK(p.B == 1 && !p.score.bias.data && !p.mask.key_start && !p.mask.key_end &&
                      !has_element_mask(p.mask),
                  "packed sequences support one batch entry, diagonals and ALiBi only");
}

ForwardPass::ForwardPass(AttentionArgs& args, const Tensor& q)
    : o(empty_like_layout(q, args.problem.D_v, args.device)),
      lse(empty(std::array<int64_t, 3>{args.problem.B, args.problem.H_q, args.problem.M},
                statistics_dtype(q), args.device)),
      block_mask(empty_block_mask(args)) {
  use_block_mask(args, block_mask);
  static_cast<Problem&>(params) = args.problem;
  params.o = strided(o, args.device);
  params.lse = lse.data_ptr();
}

BackwardPass::BackwardPass(AttentionArgs& args, const BackwardInputs& x, bool bias_needs_grad)
    : dq(empty_like_layout(x.q, x.q.size(3), args.device)),
      dk(empty_like_layout(x.k, x.k.size(3), args.device)),
      dv(empty_like_layout(x.v, x.v.size(3), args.device)),
      dbias(empty(std::array<int64_t, 1>{0}, x.q.scalar_type(), args.device)) {
  const Device& device = args.device;
  STD_TORCH_CHECK(x.block_mask || !has_element_mask(args.problem.mask),
                  "the block mask is missing");
  if (x.block_mask) use_block_mask(args, *x.block_mask);
  static_cast<Problem&>(params) = args.problem;
  params.o = strided(x.o, device);
  params.d_o = strided(x.d_o, device);
  params.dq = strided(dq, device);
  params.dk = strided(dk, device);
  params.dv = strided(dv, device);
  const Problem& p = args.problem;
  for (const Tensor* const like_o : {&x.o, &x.d_o}) {
    STD_TORCH_CHECK(
        has_sizes(*like_o, {p.B, p.H_q, p.M, p.D_v}) && like_o->scalar_type() == x.q.scalar_type(),
        "o and do must be (B, H_q, M, D_v), in the dtype of q");
  }
  const ScalarType dtype = statistics_dtype(x.q);
  args.owned.push_back(statistics(x.lse, p, dtype, device));
  params.lse = args.owned.back().data_ptr();
  if (x.dlse) {
    args.owned.push_back(statistics(*x.dlse, p, dtype, device));
    params.dlse = args.owned.back().data_ptr();
  }
  if (bias_needs_grad) {
    STD_TORCH_CHECK(x.bias, "bias_needs_grad requires a bias");
    std::copy_n(x.bias->sizes().data(), 4, params.bias_size);
    dbias = empty(params.bias_size, x.bias->scalar_type(), device);
    params.dbias = strided(dbias, device);
  }
}

}  // namespace tk
