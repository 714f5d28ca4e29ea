#include "common/options.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "common/mask.h"
#include "common/philox.h"

namespace tk {

namespace {

// Extents of shapes.
constexpr std::string_view kExtents[] = {
    "B",         "H_q", "M",     "N", "S + 1", "pages",   "rows", "columns",
    "distances", "D",   "tests", "S", "count", "entries", "H_kv", "positions"};
using Sizes = std::array<int64_t, std::size(kExtents)>;  // -1: any size
enum Extent : size_t {
  kB,
  kH,
  kM,
  kN,
  kEnds,
  kPages,
  kRows,
  kColumns,
  kDistances,
  kD,
  kTests,
  kS,
  kCount,
  kEntries,
  kKeyHeads,
  kPositions
};

// A shape in the notation of fields.h.
struct Shape {
  struct Dimension {
    size_t extent;
    bool broadcasts;  // 1 is accepted too
  };
  Dimension dimensions[4]{};
  int32_t count = 0;

  consteval Shape(std::string_view text) {
    for (text = text.substr(1, text.size() - 2); !text.empty(); ++count) {
      const std::string_view one = text.substr(0, text.find(", "));
      const bool broadcasts = one.starts_with("1|");
      const auto* const extent =
          std::find(std::begin(kExtents), std::end(kExtents), one.substr(broadcasts ? 2 : 0));
      dimensions[count] = {static_cast<size_t>(extent - kExtents), broadcasts};
      text.remove_prefix(std::min(text.size(), one.size() + 2));
    }
  }

  // Sets the sizes that are still -1.
  bool fits(const View& x, Sizes& sizes) const {
    if (x.dimensions != count) return false;
    for (int32_t d = 0; d < count; ++d) {
      if (dimensions[d].broadcasts && x.size[d] == 1) continue;
      int64_t& size = sizes[dimensions[d].extent];
      if (size == -1) size = x.size[d];
      if (x.size[d] != size) return false;
    }
    return true;
  }
};

struct TensorField {
  const char* name;
  Elements elements;
  Memory memory;
  const char* text;
  Shape shape;
  std::string_view layouts;
};

constexpr const char* kLayouts[] = {"dense", "varlen", "cache"};

Element statistics(DType dtype) {
  return dtype == DType::kFloat64 ? Element::kFloat64 : Element::kFloat32;
}

bool is_one_of(Element element, Elements elements, DType dtype) {
  const bool is_single = element == Element::kFloat32, is_int64 = element == Element::kInt64;
  if (elements == Elements::kValues) return element == static_cast<Element>(dtype) || is_single;
  if (elements == Elements::kInputs) return element == static_cast<Element>(dtype);
  if (elements == Elements::kStatistics) return element == statistics(dtype);
  if (elements == Elements::kIndex) return element == Element::kInt32 || is_int64;
  if (elements == Elements::kFloat32) return is_single;
  if (elements == Elements::kInt32) return element == Element::kInt32;
  return elements == Elements::kBool ? element == Element::kBool : is_int64;
}

const char* text_of(Elements elements) {
  constexpr const char* kTexts[] = {"in q's dtype or float32",
                                    "in q's dtype",
                                    "in float32 (float64 for float64 inputs)",
                                    "float32",
                                    "int32",
                                    "int64",
                                    "bool",
                                    "int32"};
  return kTexts[static_cast<size_t>(elements)];
}

Reason check_tensor(const TensorField& field, const View& x, DType dtype, const char* kind,
                    Sizes& sizes) {
  if (field.layouts.find(kind) == std::string_view::npos) {
    return std::string(field.name) + " is not supported in a " + kind + " call";
  }
  const bool must_be_contiguous =
      field.memory == Memory::kContiguous && field.elements != Elements::kIndex;
  if (field.shape.fits(x, sizes) && is_one_of(x.element, field.elements, dtype) &&
      (!must_be_contiguous || is_contiguous(x))) {
    return {};
  }
  return std::string(field.name) + " must be " + field.text + ", " + text_of(field.elements);
}

// Upper bounds of M and N for packed sequences; elsewhere M and N.
struct Bounds {
  int64_t M, N;

  Bounds(const Problem& p, const LayoutParams& layout, const Options& options) : M(p.M), N(p.N) {
    if (layout.kind != LayoutKind::kVarlen) return;
    M = std::clamp<int64_t>(options.max_seqlen_q, 0, INT32_MAX);
    N = std::clamp<int64_t>(options.max_seqlen_k, 0, INT32_MAX);
  }

  // Number of distances i + d - j.
  int64_t distances() const { return std::max<int64_t>(M + N - 1, 0); }
};

Reason check_tensors(const Problem& p, const LayoutParams& layout, const Options& options) {
  const bool is_packed = layout.kind == LayoutKind::kVarlen;
  Sizes sizes;
  sizes.fill(-1);
  sizes[kB] = p.B, sizes[kH] = p.H_q, sizes[kM] = p.M, sizes[kN] = p.N, sizes[kD] = p.D;
  sizes[kDistances] = Bounds(p, layout, options).distances();
  sizes[kS] = is_packed ? options.cu_seqlens_q.size[0] - 1 : p.B;
  const KVCache& cache = layout.cache;
  sizes[kEntries] = cache.page_size > 0 ? cache.pages : p.B, sizes[kKeyHeads] = p.H_kv;
  sizes[kPositions] = cache.page_size > 0 ? cache.page_size : p.N;
  if (options.selected && options.selected_size < 1) return "selected_size must be at least 1";
  if (options.blocks) {
    if (options.block_size < 1) return "block_size must be at least 1";
    const int64_t size = bounded_block_size(p, options.block_size);
    sizes[kRows] = (p.M + size - 1) / size;
    sizes[kColumns] = (p.N + size - 1) / size;
  }
  const char* const kind = kLayouts[static_cast<size_t>(layout.kind)];
  Reason reason;
#define TK_TENSOR(name, elements, memory, shape, layouts)                          \
  if (options.name && reason.empty()) {                                            \
    static constexpr TensorField kField{#name, Elements::elements, Memory::memory, \
                                        shape, Shape(shape),       layouts};       \
    reason = check_tensor(kField, options.name, p.dtype, kind, sizes);             \
  }
  TK_FIELDS(TK_NO_FIELD, TK_TENSOR)
#undef TK_TENSOR
  return reason;
}

Reason check_positions(const Options& options) {
  const View &low = options.q_low, &high = options.q_high;
  if (!low != !high || !low != !options.k_position) {
    return "q_low, q_high and k_position must be given together";
  }
  if (low && !std::equal(low.size, low.size + 4, high.size)) {
    return "q_low and q_high must have the same shape";
  }
  if (low && low.size[0] == 0) return "q_low must hold at least one position test";
  return {};
}

// Fills in sizes, strides and dtype. With pages N is the capacity of a row of the block table.
Reason set_inputs(Problem& p, LayoutParams& layout, const Inputs& inputs, const Options& options) {
  const auto& [q, k, v] = inputs;
  const View& table = options.block_table;
  for (const View* x : {&q, &k, &v}) {
    if (x->dimensions != 4) return "q, k and v: expected a 4-D tensor";
  }
  if (q.element > Element::kFloat64) {
    return "attention supports float16, bfloat16, float32 and float64";
  }
  p.is_int8 = static_cast<bool>(options.k_scale);
  if (p.is_int8 != static_cast<bool>(options.v_scale)) {
    return "k_scale and v_scale must be given together";
  }
  if (p.is_int8 && options.relative_keys) return "relative_keys with int8 caches";
  p.dtype = static_cast<DType>(q.element);
  p.q = strided(q), p.k = strided(k), p.v = strided(v);
  p.B = q.size[0], p.H_q = q.size[1], p.M = q.size[2], p.D = q.size[3];
  p.H_kv = k.size[1], p.N = k.size[2], p.D_v = v.size[3];
  int64_t entries = p.B;
  bool fit = v.size[2] == p.N;
  if (table.dimensions == 2) {
    KVCache& cache = layout.cache;
    if (p.N == 0) return "the page size of the cache must be at least 1";
    cache.pages = entries = k.size[0];
    cache.page_size = p.N;
    cache.max_pages = table.size[1];
    fit = fit && !__builtin_mul_overflow(cache.page_size, cache.max_pages, &p.N);
  }
  p.lse_stride = p.M;
  if (fit && k.size[0] == entries && v.size[0] == entries && v.size[1] == p.H_kv &&
      k.size[3] == p.D && p.H_kv > 0 && p.H_q > 0 && p.H_q % p.H_kv == 0 &&
      k.element == v.element && k.element == (p.is_int8 ? Element::kInt8 : q.element)) {
    return {};
  }
  return layout.kind == LayoutKind::kCache ? "q and the caches do not fit together"
                                           : "q, k and v do not fit together";
}

template <typename T>
const T* data_of(const View& x) {
  return static_cast<const T*>(x.data);
}

// x + shift, all within UNBOUNDED.
int64_t shifted(int64_t x, int64_t shift) {
  const int64_t sum =
      std::clamp(x, -kUnbounded, kUnbounded) + std::clamp(shift, -kUnbounded + 1, kUnbounded - 1);
  return std::clamp(sum, -kUnbounded, kUnbounded);
}

// Strides of a contiguous (tests, 1|B, 1|H_q, length) tensor.
void set_position_strides(int64_t* stride, const View& x) {
  const int64_t head = x.size[3], batch = x.size[2] * head;
  stride[0] = x.size[1] * batch;
  stride[1] = x.size[1] == 1 ? 0 : batch;
  stride[2] = x.size[2] == 1 ? 0 : head;
}

void set_mask(MaskParams& mask, const Problem& p, const Options& options, int64_t shift) {
  mask.diagonal_low = shifted(options.diagonal_low, shift);
  mask.diagonal_high = shifted(options.diagonal_high, shift);
  mask.key_start = data_of<int64_t>(options.key_start);
  mask.key_end = data_of<int64_t>(options.key_end);
  if (options.q_low) {
    mask.q_low = data_of<int64_t>(options.q_low);
    mask.q_high = data_of<int64_t>(options.q_high);
    mask.k_position = data_of<int64_t>(options.k_position);
    mask.tests = options.q_low.size[0];
    set_position_strides(mask.q_position_stride, options.q_low);
    set_position_strides(mask.k_position_stride, options.k_position);
  }
  if (options.dense) {
    const Strided dense = strided(options.dense);
    mask.dense = static_cast<const uint8_t*>(dense.data);
    std::copy_n(dense.stride, 4, mask.dense_stride);
  }
  if (options.blocks) {
    const View& x = options.blocks;
    mask.blocks = data_of<uint8_t>(x);
    mask.block_size = bounded_block_size(p, options.block_size);
    for (int64_t d = 0; d < 3; ++d) mask.blocks_stride[d] = x.size[d] == 1 ? 0 : x.stride[d];
  }
  if (options.selected) {
    const View& x = options.selected;
    static constexpr int32_t kNone = -1;  // stands for lists without entries
    mask.selected = x.size[3] ? data_of<int32_t>(x) : &kNone;
    mask.selected_count = x.size[3];
    mask.selected_size = std::min(options.selected_size, std::max<int64_t>(p.N, 1));
    const int64_t head = p.M * x.size[3];
    mask.selected_stride[0] = x.size[0] == 1 ? 0 : x.size[1] * head;
    mask.selected_stride[1] = x.size[1] == 1 ? 0 : head;
  }
}

// The only optional number is the scale.
double value_or(const std::optional<double>& x, double otherwise) { return x.value_or(otherwise); }
double value_or(double x, double) { return x; }
int64_t value_or(int64_t x, double) { return x; }

// A dense call has the same table with both origins. Other calls add each sequence's own N - M to
// the offset if the origin is bottom right: the table then begins at distance 1 - M.
void set_relative(ScoreParams& score, const Problem& p, const LayoutParams& layout,
                  const Options& options) {
  const View &table = options.relative_bias, &keys = options.relative_keys;
  if (!table && !keys) return;
  const Bounds bounds(p, layout, options);
  const bool is_shifted = layout.kind != LayoutKind::kDense && options.bottom_right;
  score.distances = bounds.distances();
  score.relative_offset = (is_shifted ? bounds.M : bounds.N) - 1;
  if (table) {
    score.relative_bias = table.data;
    score.relative_stride = table.size[0] == 1 ? 0 : score.distances;
  }
  if (keys) {
    score.relative_keys = keys.data;
    score.relative_keys_stride = keys.size[0] == 1 ? 0 : score.distances * p.D;
  }
}

void set_scores(ScoreParams& score, const Problem& p, const Options& options, int64_t shift) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(p.D));
#define TK_NUMBER(type, kind, name, layouts) score.name = value_or(options.name, scale);
  TK_SCORE_FIELDS(TK_NUMBER, TK_NO_FIELD)
#undef TK_NUMBER
  score.alibi_offset = shifted(options.alibi_offset, shift);
  if (options.alibi_slopes) {
    score.alibi_slopes = options.alibi_slopes.data;
    score.alibi_stride = options.alibi_slopes.size[0] == 1 ? 0 : p.H_q;
  }
  if (!options.bias) return;
  score.bias = strided(options.bias);
  score.bias_dtype = static_cast<DType>(options.bias.element);
}

void set_layout(LayoutParams& layout, const Problem& p, const Options& options) {
  layout.max_seqlen_q = p.M;
  layout.max_seqlen_k = p.N;
  if (layout.kind == LayoutKind::kVarlen) {
    layout.varlen = {options.cu_seqlens_q.size[0] - 1, data_of<int32_t>(options.cu_seqlens_q),
                     data_of<int32_t>(options.cu_seqlens_k), options.bottom_right};
    layout.max_seqlen_q = std::clamp<int64_t>(options.max_seqlen_q, 0, p.M);
    layout.max_seqlen_k = std::clamp<int64_t>(options.max_seqlen_k, 0, p.N);
  } else if (layout.kind == LayoutKind::kCache) {
    layout.cache.cache_seqlens = data_of<int32_t>(options.cache_seqlens);
    layout.cache.block_table = data_of<int32_t>(options.block_table);
    layout.cache.bottom_right = options.bottom_right;
  }
}

Reason check_dropout(const LayoutParams& layout, const Options& options) {
  if (!(options.dropout_p >= 0 && options.dropout_p <= 1)) {
    return "dropout_p must be between 0 and 1";
  }
  if (options.dropout_p > 0 && !options.seed) return "dropout needs a seed";
  const std::pair<const char*, int64_t> offsets[] = {{"dropout_row", options.dropout_row},
                                                     {"dropout_column", options.dropout_column},
                                                     {"dropout_head", options.dropout_head}};
  for (const auto& [name, offset] : offsets) {
    if (offset < 0 || offset > INT32_MAX) {
      return std::string(name) + " must be between 0 and 2^31 - 1, got " + std::to_string(offset);
    }
    if (offset > 0 && layout.kind != LayoutKind::kDense) {
      return std::string(name) + " is not supported in a " +
             kLayouts[static_cast<size_t>(layout.kind)] + " call";
    }
  }
  for (const auto& [name, offset] : {offsets[0], offsets[1]}) {
    if (offset % kPhiloxBlock != 0) {
      return std::string(name) + " must be a multiple of " + std::to_string(kPhiloxBlock) +
             ", got " + std::to_string(offset);
    }
  }
  return {};
}

void set_dropout(DropoutParams& dropout, const Options& options) {
  dropout.first_head = options.dropout_head;
  dropout.first_row = options.dropout_row;
  dropout.first_column = options.dropout_column;
}

bool has_element_mask(const Options& options) {
  return options.q_low || options.dense || options.blocks || options.selected;
}

Reason set_block_mask(MaskParams& mask, const Problem& p, const Options& options, const View& x) {
  const auto shape = block_mask_shape(p, options);
  if (!shape) return {};
  const auto [B, H, rows, columns] = *shape;
  if (!x) return "the block mask is missing";
  if (!x.has_size({B, H, rows, columns}) || x.element != Element::kUint8 || !is_contiguous(x)) {
    return "the block mask must be that of a forward pass with the same options";
  }
  mask.block_mask = static_cast<uint8_t*>(x.data);
  mask.block_mask_stride[0] = B == 1 ? 0 : H * rows * columns;
  mask.block_mask_stride[1] = H == 1 ? 0 : rows * columns;
  mask.block_mask_stride[2] = columns;
  return {};
}

bool is_like_o(const View& x, const Problem& p) {
  return x.has_size({p.B, p.H_q, p.M, p.D_v}) && x.element == static_cast<Element>(p.dtype);
}

bool are_statistics(const View& x, const Problem& p, std::initializer_list<int64_t> size) {
  return x.has_size(size) && x.element == statistics(p.dtype) && is_contiguous(x);
}

// `count` is 2, or 1 for lse alone.
bool are_row_stats(const View& x, const Problem& p, int64_t count) {
  return are_statistics(x, p, {count, p.B, p.H_q, p.M});
}

void* lse_rest_of(const View& row_stats, const Problem& p) {
  const int64_t bytes = p.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  return static_cast<char*>(row_stats.data) + p.B * p.H_q * p.M * bytes;
}

bool has_unit_stride(const View& x) { return x.size[3] == 1 || x.stride[3] == 1; }

bool is_gradient(const View& x, const Problem& p, std::initializer_list<int64_t> size) {
  return x.has_size(size) && x.element == static_cast<Element>(p.dtype) && has_unit_stride(x);
}

}  // namespace

Reason set_problem(Problem& p, LayoutParams& layout, const Inputs& inputs, const Options& options) {
  layout.kind = options.cu_seqlens_q    ? LayoutKind::kVarlen
                : options.cache_seqlens ? LayoutKind::kCache
                                        : LayoutKind::kDense;
  if (Reason reason = set_inputs(p, layout, inputs, options); !reason.empty()) {
    return reason;
  }
  if (Reason reason = check_tensors(p, layout, options); !reason.empty()) return reason;
  if (p.is_int8) p.k_scale = strided(options.k_scale), p.v_scale = strided(options.v_scale);
  if (Reason reason = check_positions(options); !reason.empty()) return reason;
  if (layout.kind == LayoutKind::kVarlen) {
    if (!options.cu_seqlens_k) return "cu_seqlens_q and cu_seqlens_k must be given together";
    if (options.cu_seqlens_q.size[0] == 0) return "cu_seqlens must have at least one element";
    if (p.B != 1) return "packed sequences must be one batch entry";
  }
  if ((layout.kind == LayoutKind::kCache || options.block_table) && p.N > INT32_MAX) {
    return "the cache capacity must be less than 2^31 positions per sequence";
  }
  if (Reason reason = check_dropout(layout, options); !reason.empty()) return reason;
  if (options.alibi_slopes && options.alibi_slopes.size[0] > INT32_MAX / p.H_q) {
    return "alibi_slopes must have fewer than 2^31 elements";
  }
  const bool is_shifted = layout.kind == LayoutKind::kDense && options.bottom_right;
  const int64_t shift = is_shifted ? p.N - p.M : 0;
  set_mask(p.mask, p, options, shift);
  set_scores(p.score, p, options, shift);
  set_relative(p.score, p, layout, options);
  set_dropout(p.dropout, options);
  set_layout(layout, p, options);
  return {};
}

std::optional<std::array<int64_t, 4>> block_mask_shape(const Problem& p, const Options& options) {
  if (!has_element_mask(options)) return {};
  int64_t B = 1, H = 1;
  const auto include = [&](int64_t batches, int64_t heads) {
    B = batches == 1 ? B : batches;
    H = heads == 1 ? H : heads;
  };
  if (options.q_low) {
    include(options.q_low.size[1], options.q_low.size[2]);
    include(options.k_position.size[1], options.k_position.size[2]);
  }
  if (options.dense) include(options.dense.size[0], options.dense.size[1]);
  if (options.blocks) H = std::max(H, options.blocks.size[0]);
  if (options.selected) include(options.selected.size[0], options.selected.size[1]);
  const auto count = [](int64_t n) { return (n + kBlockMaskSize - 1) / kBlockMaskSize; };
  return {{B, H, count(p.M), count(p.N)}};
}

Reason set_outputs(ForwardParams& p, const Options& options, const View& o, const View& row_stats,
                   const View& block_mask) {
  if (!is_like_o(o, p) || !has_unit_stride(o)) return "o must be (B, H_q, M, D_v)";
  const bool has_rest = row_stats && are_row_stats(row_stats, p, 2);
  if (row_stats && !has_rest && !are_row_stats(row_stats, p, 1)) {
    return "row_stats must be (2, B, H_q, M), or (1, B, H_q, M)";
  }
  p.o = strided(o);
  p.lse = row_stats.data;
  p.lse_rest = has_rest ? lse_rest_of(row_stats, p) : nullptr;
  return set_block_mask(p.mask, p, options, block_mask);
}

Reason set_tensors(BackwardParams& p, const Options& options, const BackwardTensors& x) {
  if (!is_like_o(x.o, p) || !is_like_o(x.d_o, p)) {
    return "o and do must be (B, H_q, M, D_v), in the dtype of q";
  }
  if (!are_row_stats(x.row_stats, p, 2)) {
    return "row_stats must be (2, B, H_q, M), as from the forward pass";
  }
  if (x.dlse && !are_statistics(x.dlse, p, {p.B, p.H_q, p.M})) {
    return "dlse must be (B, H_q, M), in the dtype of row_stats";
  }
  if (!is_gradient(x.dq, p, {p.B, p.H_q, p.M, p.D}) ||
      !is_gradient(x.dk, p, {p.B, p.H_kv, p.N, p.D}) ||
      !is_gradient(x.dv, p, {p.B, p.H_kv, p.N, p.D_v})) {
    return "dq, dk and dv must be like q, k and v";
  }
  p.o = strided(x.o), p.d_o = strided(x.d_o);
  p.dq = strided(x.dq), p.dk = strided(x.dk), p.dv = strided(x.dv);
  p.lse = x.row_stats.data, p.lse_rest = lse_rest_of(x.row_stats, p);
  p.dlse = x.dlse.data;
  if (x.dbias) {
    p.dbias = strided(x.dbias);
    std::copy_n(x.dbias.size, 4, p.bias_size);
  }
  if (x.drelative_bias) p.drelative_bias = x.drelative_bias.data;
  if (x.drelative_keys) p.drelative_keys = x.drelative_keys.data;
  return set_block_mask(p.mask, p, options, x.block_mask);
}

}  // namespace tk
