// The operators: tensors in, params out. The only file that sees torch headers (stable ABI, so that
// one build serves every later torch). What a caller may get wrong is checked in validate.py; here
// stands only what memory safety needs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "cpu/dispatch.h"
#include "mask.h"
#include "memory.h"
#include "run.h"
#include "varlen.h"

namespace {

using tk::Strided;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

// The optional tensors, in the order of `Extras` in problem.py, and the numbers of `ops.numbers`.
#define TK_EXTRAS                                                                            \
  Optional bias, Optional alibi_slopes, Optional seed, Optional key_start, Optional key_end, \
      Optional q_segments, Optional k_segments, Optional dense, Optional layout,             \
      Optional cu_seqlens_q, Optional cu_seqlens_k, double scale, double softcap,            \
      double dropout_p, int64_t diagonal_low, int64_t diagonal_high, int64_t block_size,     \
      int64_t alibi_offset, bool from_end

#define TK_EXTRAS_SCHEMA                                                                        \
  "Tensor? bias, Tensor? alibi_slopes, Tensor? seed, Tensor? key_start, Tensor? key_end, "      \
  "Tensor? q_segments, Tensor? k_segments, Tensor? dense, Tensor? layout, "                     \
  "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, float scale, "                                   \
  "float softcap, float dropout_p, SymInt diagonal_low, SymInt diagonal_high, int block_size, " \
  "SymInt alibi_offset, bool from_end"

void launch(int64_t count, void (*body)(void*, int64_t), void* context) {
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) body(context, worker);
  });
}

tk::DType dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Half:
      return tk::DType::kFloat16;
    case ScalarType::BFloat16:
      return tk::DType::kBFloat16;
    case ScalarType::Float:
      return tk::DType::kFloat32;
    case ScalarType::Double:
      return tk::DType::kFloat64;
    default:
      STD_TORCH_CHECK(false, "attention takes float16, bfloat16, float32 or float64");
  }
}

ScalarType statistics_dtype(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

tk::View view(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 4 && x.is_cpu(), "expected a CPU tensor of four dimensions");
  return {x.data_ptr(), dtype_of(x), x.sizes().data(), x.strides().data()};
}

Strided strided(const Tensor& x) { return tk::strided(view(x)); }

// By torch's C function: by name, through the dispatcher, an allocation takes three times as long.
Tensor empty_strided(std::span<const int64_t> sizes, std::span<const int64_t> strides,
                     ScalarType dtype) {
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
      aoti_torch_device_type_cpu(), 0, &made));
  const Tensor x(made);
  int64_t bytes;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(made, &bytes));
  tk::expect_writes(x.data_ptr(), static_cast<size_t>(bytes));
  tk::poison(x.data_ptr(), static_cast<size_t>(bytes));
  return x;
}

Tensor empty(std::span<const int64_t> sizes, ScalarType dtype) {
  std::array<int64_t, 4> strides;
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= std::max<int64_t>(sizes[d], 1)) {
    strides[d] = stride;
  }
  return empty_strided(sizes, std::span(strides).first(sizes.size()), dtype);
}

// (B, H, L, width) with x's order of heads and sequence in memory.
Tensor empty_like_layout(const Tensor& x, int64_t width) {
  const int64_t H = x.size(1), L = x.size(2);
  const std::array<int64_t, 4> sizes{x.size(0), H, L, width};
  if (x.stride(1) >= x.stride(2)) return empty(sizes, x.scalar_type());
  const int64_t row = std::max<int64_t>(width, 1), heads = std::max<int64_t>(H, 1);
  const std::array<int64_t, 4> strides{std::max<int64_t>(L, 1) * heads * row, row, heads * row, 1};
  return empty_strided(sizes, strides, x.scalar_type());
}

const int64_t* integers(const Tensor& x, std::initializer_list<int64_t> shape) {
  bool fits = x.scalar_type() == ScalarType::Long && x.is_cpu() && x.is_contiguous() &&
              x.dim() == static_cast<int64_t>(shape.size());
  int64_t d = 0;
  for (const int64_t size : shape) fits = fits && x.size(d++) == size;
  STD_TORCH_CHECK(fits, "a mask's integers do not fit the problem");
  return static_cast<const int64_t*>(x.data_ptr());
}

const uint8_t* booleans(const Tensor& x, int64_t dims) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Bool && x.is_cpu() && x.dim() == dims,
                  "a mask's booleans do not fit the problem");
  return static_cast<const uint8_t*>(x.data_ptr());
}

const int32_t* starts(const Tensor& cu_seqlens, int64_t count) {
  STD_TORCH_CHECK(cu_seqlens.scalar_type() == ScalarType::Int && cu_seqlens.is_cpu() &&
                      cu_seqlens.dim() == 1 && cu_seqlens.size(0) == count && count > 0,
                  "cu_seqlens must be two vectors of int32, of equal length, at least 1");
  return static_cast<const int32_t*>(cu_seqlens.data_ptr());
}

// Everything that a call's params point to lives as long as this.
struct Call {
  Call(const Tensor& q, const Tensor& k, const Tensor& v, TK_EXTRAS);

  void set_mask(int64_t low, int64_t high, int64_t block_size);
  void set_scores(const Optional& bias, const Optional& slopes, const Optional& seed);
  void set_packing(bool from_end);

  tk::Problem problem{};
  std::optional<tk::Packing> packing;
  std::vector<Tensor> kept;
  Optional key_start, key_end, q_segments, k_segments, dense, layout, cu_seqlens_q, cu_seqlens_k;
};

Optional contiguous(const Optional& x) { return x ? Optional(torch::stable::contiguous(*x)) : x; }

Call::Call(const Tensor& q, const Tensor& k, const Tensor& v, TK_EXTRAS)
    : key_start(contiguous(key_start)),
      key_end(contiguous(key_end)),
      q_segments(contiguous(q_segments)),
      k_segments(contiguous(k_segments)),
      dense(std::move(dense)),
      layout(std::move(layout)),
      cu_seqlens_q(contiguous(cu_seqlens_q)),
      cu_seqlens_k(contiguous(cu_seqlens_k)) {
  STD_TORCH_CHECK(tk::set_tensors(problem, view(q), view(k), view(v)),
                  "q, k and v do not fit together");
  set_mask(diagonal_low, diagonal_high, block_size);
  problem.score.scale = scale;
  problem.score.softcap = softcap;
  problem.score.alibi_offset = alibi_offset;
  problem.dropout.p = dropout_p;
  set_scores(bias, alibi_slopes, seed);
  set_packing(from_end);
}

void Call::set_mask(int64_t low, int64_t high, int64_t block_size) {
  const tk::Problem& p = problem;
  tk::MaskParams& mask = problem.mask;
  mask.diagonal_low = low;
  mask.diagonal_high = high;
  if (key_start) mask.key_start = integers(*key_start, {p.B});
  if (key_end) mask.key_end = integers(*key_end, {p.B});
  STD_TORCH_CHECK(q_segments.has_value() == k_segments.has_value(), "segments come in pairs");
  if (q_segments) {
    mask.q_segments = integers(*q_segments, {p.B, p.M});
    mask.k_segments = integers(*k_segments, {p.B, p.N});
  }
  if (dense) {
    mask.dense = booleans(*dense, 4);
    const int64_t sizes[4] = {p.B, p.H_q, p.M, p.N};
    for (int64_t d = 0; d < 4; ++d) {
      const int64_t size = dense->size(d);
      STD_TORCH_CHECK(size == 1 || size == sizes[d], "the dense mask does not broadcast");
      mask.dense_stride[d] = size == 1 ? 0 : dense->stride(d);
    }
  }
  if (layout) {
    mask.layout = booleans(*layout, 3);
    mask.block_size = block_size;
    STD_TORCH_CHECK(block_size > 0 && layout->size(1) >= (p.M + block_size - 1) / block_size &&
                        layout->size(2) >= (p.N + block_size - 1) / block_size &&
                        (layout->size(0) == 1 || layout->size(0) == p.H_q),
                    "the layout does not fit the problem");
    for (int64_t d = 0; d < 3; ++d) mask.layout_stride[d] = layout->stride(d);
    if (layout->size(0) == 1) mask.layout_stride[0] = 0;
  }
}

void Call::set_scores(const Optional& bias, const Optional& slopes, const Optional& seed) {
  tk::Problem& p = problem;
  if (bias) {
    p.score.bias = strided(*bias);
    p.score.bias_dtype = dtype_of(*bias);
    const int64_t sizes[4] = {p.B, p.H_q, p.M, p.N};
    for (int64_t d = 0; d < 4; ++d) {
      STD_TORCH_CHECK(bias->size(d) == 1 || bias->size(d) == sizes[d],
                      "the bias does not broadcast");
    }
  }
  if (slopes) {
    const bool double_wanted = p.dtype == tk::DType::kFloat64;
    STD_TORCH_CHECK(
        slopes->dim() == 1 && slopes->size(0) == p.H_q && slopes->is_cpu() &&
            slopes->scalar_type() == (double_wanted ? ScalarType::Double : ScalarType::Float),
        "the ALiBi slopes do not fit the problem");
    kept.push_back(torch::stable::contiguous(*slopes));
    p.score.alibi_slopes = kept.back().data_ptr();
  }
  STD_TORCH_CHECK(p.dropout.p == 0 || seed, "dropout needs a seed");
  if (seed) {
    STD_TORCH_CHECK(seed->scalar_type() == ScalarType::Long && seed->numel() == 1 && seed->is_cpu(),
                    "the seed must be one int64 on the CPU");
    p.dropout.seed = static_cast<uint64_t>(*static_cast<const int64_t*>(seed->data_ptr()));
  }
}

void Call::set_packing(bool from_end) {
  STD_TORCH_CHECK(cu_seqlens_q.has_value() == cu_seqlens_k.has_value(), "cu_seqlens come in pairs");
  if (!cu_seqlens_q) return;
  const int64_t count = cu_seqlens_q->numel();
  packing = {count - 1, starts(*cu_seqlens_q, count), starts(*cu_seqlens_k, count), from_end};
  const tk::Problem& p = problem;
  STD_TORCH_CHECK(p.B == 1 && !p.score.bias.data && !p.mask.key_start && !p.mask.key_end &&
                      !tk::needs_flags(p.mask),
                  "packed sequences take one batch entry, diagonals and ALiBi alone");
  STD_TORCH_CHECK(tk::fits(*packing, p.M, p.N),
                  "cu_seqlens must start at 0, never fall, and end within the rows");
}

// (B or 1, H_q or 1, row blocks, column blocks): 1 where the mask does not depend on it. Empty when
// diagonals and key ranges say it all. `_summary_shape` in ops.py tells the same.
Tensor empty_summary(const Call& call) {
  const tk::Problem& p = call.problem;
  if (!tk::needs_flags(p.mask)) return empty(std::array<int64_t, 1>{0}, ScalarType::Byte);
  int64_t B = call.q_segments ? p.B : 1, H = 1;
  if (call.dense) {
    B = std::max(B, call.dense->size(0));
    H = std::max(H, call.dense->size(1));
  }
  if (call.layout) H = std::max(H, call.layout->size(0));
  const auto blocks = [](int64_t n) { return (n + tk::kSummaryBlock - 1) / tk::kSummaryBlock; };
  return empty(std::array<int64_t, 4>{B, H, blocks(p.M), blocks(p.N)}, ScalarType::Byte);
}

void use_summary(Call& call, const Tensor& summary) {
  if (!tk::needs_flags(call.problem.mask)) return;
  STD_TORCH_CHECK(summary.dim() == 4 && summary.scalar_type() == ScalarType::Byte,
                  "the block summary is not one");
  tk::MaskParams& mask = call.problem.mask;
  mask.summary = static_cast<uint8_t*>(summary.data_ptr());
  const int64_t rows = summary.size(2), columns = summary.size(3);
  mask.summary_stride[0] = summary.size(0) == 1 ? 0 : summary.size(1) * rows * columns;
  mask.summary_stride[1] = summary.size(1) == 1 ? 0 : rows * columns;
  mask.summary_stride[2] = columns;
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(Tensor q, Tensor k, Tensor v, TK_EXTRAS) {
  Call call(q, k, v, bias, alibi_slopes, seed, key_start, key_end, q_segments, k_segments, dense,
            layout, cu_seqlens_q, cu_seqlens_k, scale, softcap, dropout_p, diagonal_low,
            diagonal_high, block_size, alibi_offset, from_end);
  const tk::Problem& p = call.problem;

  Tensor summary = empty_summary(call);
  use_summary(call, summary);
  if (p.mask.summary) {
    tk::cpu::kernels().summarize(p.mask, summary.size(0), summary.size(1), p.M, p.N, tk::workers());
  }
  Tensor o = empty_like_layout(q, p.D_v);
  Tensor lse = empty(std::array<int64_t, 3>{p.B, p.H_q, p.M}, statistics_dtype(q));
  tk::ForwardParams params{};
  static_cast<tk::Problem&>(params) = p;
  params.o = strided(o);
  params.lse = lse.data_ptr();
  call.packing ? tk::run_forward(params, *call.packing) : tk::run_forward(params);
  return {o, lse, summary};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(Tensor d_o, Optional dlse, Tensor q,
                                                              Tensor k, Tensor v, Tensor o,
                                                              Tensor lse, Optional block_summary,
                                                              TK_EXTRAS, bool bias_needs_grad) {
  Call call(q, k, v, bias, alibi_slopes, seed, key_start, key_end, q_segments, k_segments, dense,
            layout, cu_seqlens_q, cu_seqlens_k, scale, softcap, dropout_p, diagonal_low,
            diagonal_high, block_size, alibi_offset, from_end);
  STD_TORCH_CHECK(block_summary || !tk::needs_flags(call.problem.mask),
                  "the block summary is missing");
  if (block_summary) use_summary(call, *block_summary);

  Tensor dq = empty_like_layout(q, q.size(3));
  Tensor dk = empty_like_layout(k, k.size(3));
  Tensor dv = empty_like_layout(v, v.size(3));
  Tensor dbias = empty(std::array<int64_t, 1>{0}, q.scalar_type());
  tk::BackwardParams params{};
  static_cast<tk::Problem&>(params) = call.problem;
  params.o = strided(o);
  params.d_o = strided(d_o);
  params.dq = strided(dq);
  params.dk = strided(dk);
  params.dv = strided(dv);
  const Tensor lse_rows = torch::stable::contiguous(lse);
  const Optional dlse_rows = contiguous(dlse);
  params.lse = lse_rows.data_ptr();
  params.dlse = dlse_rows ? dlse_rows->data_ptr() : nullptr;
  if (bias_needs_grad) {
    STD_TORCH_CHECK(bias, "there is no bias to give a gradient");
    std::copy_n(bias->sizes().data(), 4, params.bias_size);
    dbias = empty(params.bias_size, bias->scalar_type());
    params.dbias = strided(dbias);
  }
  call.packing ? tk::run_backward(params, *call.packing) : tk::run_backward(params);
  return {dq, dk, dv, dbias};
}

}  // namespace

tk::cpu::Workers tk::workers() {
  return {static_cast<int64_t>(torch::stable::get_num_threads()), &launch};
}

STABLE_TORCH_LIBRARY(transformer_kernels, m) {
  m.def("attention_forward(Tensor q, Tensor k, Tensor v, " TK_EXTRAS_SCHEMA
        ") -> (Tensor o, Tensor lse, Tensor block_summary)");
  m.def(
      "attention_backward(Tensor d_o, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, "
      "Tensor lse, Tensor? block_summary, " TK_EXTRAS_SCHEMA
      ", bool bias_needs_grad) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)");
}

STABLE_TORCH_LIBRARY_IMPL(transformer_kernels, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&attention_forward));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}
