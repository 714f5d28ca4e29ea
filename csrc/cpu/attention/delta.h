// delta = rowsum(do o), which the gradient of the softmax subtracts in every row.
#pragma once

#include "cpu/engine/pack.h"
#include "cpu/engine/vec_convert.h"

namespace tk::cpu::TK_ISA {

// dots[r] = a_r . b_r. rows is a multiple of kLanes, width of kChunk.
template <typename Storage, typename Real>
void dot_rows(const Storage* a, int64_t a_stride, const Storage* b, int64_t b_stride, int64_t rows,
              int64_t width, Real* dots) {
  constexpr int64_t W = kLanes<Real>;
  constexpr int kParts = ConvertedRow<Storage>::kParts;
  for (int64_t r = 0; r < rows; r += W) {
    Vec<Real> sums[W] = {};
    for (int64_t n = 0; n < W; ++n, a += a_stride, b += b_stride) {
      for (int64_t c = 0; c < width; c += kChunk<Storage>) {
        Vec<Real> x[kParts], y[kParts];
        ConvertedRow<Storage>::load(a + c, x);
        ConvertedRow<Storage>::load(b + c, y);
        for (int part = 0; part < kParts; ++part) sums[n] += x[part] * y[part];
      }
    }
    store(dots + r, row_sums<Real>(sums));
  }
}

// dots of `rows` rows from row0 on, read in place. Returns false if they are not whole vectors of
// Storage in memory.
template <typename Storage, typename Real>
bool dot_in_place(const Slice& a, const Slice& b, int64_t row0, int64_t rows, Real* dots) {
  if (a.dtype != kDTypeOf<Storage> || a.width % kChunk<Storage> != 0) return false;
  if (a.tensor.stride[3] != 1 || b.tensor.stride[3] != 1) return false;
  dot_rows(static_cast<const Storage*>(a.tensor.data) + a.offset(row0), a.tensor.stride[2],
           static_cast<const Storage*>(b.tensor.data) + b.offset(row0), b.tensor.stride[2], rows,
           a.width, dots);
  return true;
}

template <typename Real>
bool dot_in_place_any_dtype(const Slice& a, const Slice& b, int64_t row0, int64_t rows,
                            Real* dots) {
  if constexpr (sizeof(Real) == 4) {
    if (dot_in_place<BFloat16>(a, b, row0, rows, dots)) return true;
    if (dot_in_place<Float16>(a, b, row0, rows, dots)) return true;
  }
  return dot_in_place<Real>(a, b, row0, rows, dots);
}

// The same from copies in the scratch buffers (rows x padded); 0 for rows past the end and rows
// with !keep. `width` is that of dot_rows.
template <typename Storage, typename Real, typename Keep>
void dot_copies(const Slice& a, const Slice& b, int64_t row0, int64_t rows, int64_t padded,
                int64_t width, Keep&& keep, void* a_scratch, void* b_scratch, Real* dots) {
  Storage *const x = static_cast<Storage*>(a_scratch), *const y = static_cast<Storage*>(b_scratch);
  unpack_rows(a, row0, rows, padded, keep, x);
  unpack_rows(b, row0, rows, padded, keep, y);
  dot_rows(x, padded, y, padded, rows, width, dots);
}

// dots of `rows` rows (a multiple of kLanes) from row0 on; 0 for rows past the end and rows with
// !keep. Copies keep the order of summation: a row's bits depend neither on strides nor on other
// rows.
template <typename Real, typename Keep>
void row_dots(const Slice& a, const Slice& b, int64_t row0, int64_t rows, int64_t padded,
              Keep&& keep, Real* a_scratch, Real* b_scratch, Real* dots) {
  bool all = row0 + rows <= a.length;
  for (int64_t r = row0; all && r < row0 + rows; ++r) all = keep(r);
  if (all && dot_in_place_any_dtype(a, b, row0, rows, dots)) return;
  if constexpr (sizeof(Real) == 4) {
    if (a.dtype == DType::kBFloat16 && a.width % kChunk<BFloat16> == 0) {
      return dot_copies<BFloat16>(a, b, row0, rows, padded, a.width, keep, a_scratch, b_scratch,
                                  dots);
    }
  }
  dot_copies<Real>(a, b, row0, rows, padded, padded, keep, a_scratch, b_scratch, dots);
}

}  // namespace tk::cpu::TK_ISA
