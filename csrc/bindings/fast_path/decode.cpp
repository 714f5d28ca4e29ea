// CPU fast path of attention_decode; see fast_path/attention.cpp.
#include "cpu/driver/decode.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "bindings/fast_path/arguments.h"

namespace tk::direct {

namespace {

constexpr int64_t kMaxIndex = std::numeric_limits<int32_t>::max();

// An int32 view of a tensor, or a converted copy. Values outside int32 become -1, which is invalid
// in a cache.
struct Indices {
  const int32_t* data;
  std::vector<int32_t> copy;

  bool read(PyObject* object, int32_t dimensions, int64_t B, int64_t& columns) {
    dlpack::Tensor x;
    if (!direct::read(object, dimensions, x) || x.dtype.code != dlpack::kInt ||
        (x.dtype.bits != 32 && x.dtype.bits != 64) || x.shape[0] != B) {
      return false;
    }
    columns = dimensions == 1 ? 1 : x.shape[1];
    const int64_t row = x.strides[0], column = dimensions == 1 ? 1 : x.strides[1];
    if (x.dtype.bits == 32 && (column == 1 || columns == 1) && (row == columns || B == 1)) {
      data = static_cast<const int32_t*>(x.data);
      return true;
    }
    copy.resize(static_cast<size_t>(B * columns));
    for (int64_t n = 0; n < B * columns; ++n) {
      const int64_t at = n / columns * row + n % columns * column;
      const int64_t value = x.dtype.bits == 32 ? static_cast<const int32_t*>(x.data)[at]
                                               : static_cast<const int64_t*>(x.data)[at];
      copy[static_cast<size_t>(n)] =
          value < 0 || value > kMaxIndex ? -1 : static_cast<int32_t>(value);
    }
    data = copy.data();
    return true;
  }
};

}  // namespace

// Arguments: q, k_cache, v_cache, cache_seqlens, block_table or None, diagonal_low and
// diagonal_high relative to each sequence's N - M, scale, o.
PyObject* decode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!count_is(count, 9)) return nullptr;
  ForwardParams params{};
  KVCache cache{};
  View q, k, v, o;
  Indices cache_seqlens, table;
  int64_t columns;
  if (!read_input(args[0], q) || !read_input(args[1], k) || !read_input(args[2], v) ||
      !cache_seqlens.read(args[3], 1, q.size[0], columns)) {
    Py_RETURN_FALSE;
  }
  cache.cache_seqlens = cache_seqlens.data;
  if (args[4] != Py_None) {
    if (!table.read(args[4], 2, q.size[0], cache.max_pages)) Py_RETURN_FALSE;
    cache.block_table = table.data;
    cache.page_size = k.size[2];
  }
  if (!set_tensors(params, cache, q, k, v) || params.N > kMaxIndex ||
      !read_diagonals(args + 5, params) || !read_scale(args[7], params) || !read(args[8], 4, o) ||
      !is_output(o, params, params.H_q, params.M, params.D_v) || !fits(cache, params.B, params.N)) {
    Py_RETURN_FALSE;
  }
  params.o = strided(o);
  return run_unlocked([&] { run_decode(params, cache); });
}

}  // namespace tk::direct
