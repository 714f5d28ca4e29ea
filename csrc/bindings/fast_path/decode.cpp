// CPU fast path of attention_decode; see fast_path/attention.cpp.
#include "cpu/driver/decode.h"

#include <limits>

#include "bindings/fast_path/arguments.h"

namespace tk::direct {

namespace {

constexpr int64_t kMaxIndex = std::numeric_limits<int32_t>::max();

// Reads (B) or (B, columns), int32 or int64.
bool read_indices(PyObject* object, int32_t dimensions, int64_t B, IndexTensor& to,
                  int64_t& columns) {
  dlpack::Tensor x;
  if (!read(object, dimensions, x) || x.dtype.code != dlpack::kInt ||
      (x.dtype.bits != 32 && x.dtype.bits != 64) || x.shape[0] != B) {
    return false;
  }
  columns = dimensions == 1 ? 1 : x.shape[1];
  to = {x.data, x.strides[0], dimensions == 1 ? 0 : x.strides[1], x.dtype.bits == 64};
  return true;
}

}  // namespace

// Arguments: q, k_cache, v_cache, cache_seqlens, block_table or None, diagonal_low and
// diagonal_high relative to each sequence's N - M, scale, o.
PyObject* decode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!count_is(count, 9)) return nullptr;
  ForwardParams params{};
  KVCache cache{};
  View q, k, v, o;
  IndexTensor cache_seqlens, table;
  int64_t columns;
  if (!read_input(args[0], q) || !read_input(args[1], k) || !read_input(args[2], v) ||
      !read_indices(args[3], 1, q.size[0], cache_seqlens, columns)) {
    Py_RETURN_FALSE;
  }
  if (args[4] != Py_None) {
    if (!read_indices(args[4], 2, q.size[0], table, cache.max_pages)) Py_RETURN_FALSE;
    cache.page_size = k.size[2];
  }
  if (!set_tensors(params, cache, q, k, v) || params.N > kMaxIndex ||
      !read_diagonals(args + 5, params) || !read_scale(args[7], params) || !read(args[8], 4, o) ||
      !is_output(o, params, params.H_q, params.M, params.D_v)) {
    Py_RETURN_FALSE;
  }
  const auto indices = copy_indices(cache, params.B, params.N, cache_seqlens, table);
  if (!indices) Py_RETURN_FALSE;
  params.o = strided(o);
  return run_unlocked([&] { run_decode(params, cache); });
}

}  // namespace tk::direct
