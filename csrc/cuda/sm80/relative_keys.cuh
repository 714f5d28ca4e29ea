// Products of a tile of queries with relative keys: docs/attention.md, section 2.
//
//   s_ij += q_i r_e,   e = i + offset - j
//
// Queries i0, i0 + 1, ... and keys j0, j0 + 1, ... need a band of adjacent distances. Row c of the
// band has the key of c = (i - i0) - (j - j0) + kBlockN - 1. A warp multiplies 16 of its queries by
// the rows that they need, g = q r^T, and adds g_ic to s_ij: through scratch memory of its own,
// because row i of g is shifted by i. docs/attention.md, section 5.
#pragma once

#include "cuda/common/masks.cuh"

namespace tk::cuda {

template <int kColumns>
constexpr int kDistanceStride = distance_stride(kColumns);

// The relative keys of one head. Distances that the diagonals hide may hold NaN: they are not read.
template <typename Element>
struct RelativeKeys {
  Rows<const Element> rows;
  int64_t offset;
  int begin, end;  // distances of visible keys that the table has

  TK_DEVICE_METHOD bool operator()(int e) const { return e >= begin && e < end; }
};

template <typename Element, typename Params>
TK_DEVICE RelativeKeys<Element> relative_keys_of(const Arguments<Params>& a, const Sequence& s,
                                                 int h) {
  const Problem& p = a.params;
  const int64_t width = p.D, offset = p.score.relative_offset + shift_of(a.varlen, s);
  const Strided table{const_cast<void*>(p.score.relative_keys),
                      {0, p.score.relative_keys_stride, width, 1}};
  return {rows_of<const Element>(table, 0, h, 0, width), offset,
          clamp_diagonal(max(offset - s.high, int64_t{0})),
          clamp_diagonal(min(offset - s.low + 1, p.score.distances))};
}

// The band of a tile in shared memory, followed by the scratch memory of each warp. The last row,
// which no product needs, makes the number of rows a multiple of 16.
template <typename Element, int kBlockM, int kBlockN, int kWidth>
struct Band {
  using Tile = SharedTile<Element, kBlockM + kBlockN, kWidth>;
  Element* data;

  TK_DEVICE_METHOD Tile tile() const { return {data}; }

  template <int kThreads>
  TK_DEVICE_METHOD void start_load(const RelativeKeys<Element>& keys, int i0, int j0) const {
    const int first = clamp_diagonal(i0 - j0 + keys.offset - (kBlockN - 1));
    cuda::start_load<kThreads>(tile(), keys.rows, first, false, keys);
  }

  // Stores the products of the 16 queries from `row` on, for the kColumns keys from `column` on, in
  // the warp's scratch memory. A barrier of the CTA must separate two calls. They precede q k^T, so
  // that only one of both is in registers.
  template <int kColumns, typename QueryTile>
  TK_DEVICE_METHOD void multiply(const QueryTile& q, int row, int column) const {
    Accumulator<1, kColumns / 8 + 2> g;
    g.clear();
    add_product<Major::kK, Major::kK, kWidth>(g, q, row, tile(), row - column + kBlockN - kColumns);
    float* const scratch = scratch_of<kColumns>();
    g.for_each_pair([&](int i, int c, float x, float y) {
      store_two(scratch + i * kDistanceStride<kColumns> + c, x, y);
    });
    __syncwarp();  // the products are written
  }

  // Adds the stored products to s.
  template <int kN>
  TK_DEVICE_METHOD void add_products(Accumulator<1, kN>& s) const {
    constexpr int kColumns = 8 * kN;
    const float* const scratch = scratch_of<kColumns>();
    for_each_element<1, kN>([&](int, int n, int e) {
      const int i = row_of(e), j = 8 * n + column_of(e);
      s.x[0][n][e] += scratch[i * kDistanceStride<kColumns> + i - j + kColumns - 1];
    });
  }

 private:
  template <int kColumns>
  TK_DEVICE_METHOD float* scratch_of() const {
    return reinterpret_cast<float*>(data + (kBlockM + kBlockN) * kWidth) +
           warp_index() * (16 * kDistanceStride<kColumns>);
  }
};

}  // namespace tk::cuda
