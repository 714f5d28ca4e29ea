// The state that a CTA carries from chunk to chunk: in registers, and as an operand of products.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/linear/segments.cuh"

namespace tk::cuda {

// Contiguous float32 S (n, H_kv, D, D_v) and z (n, H_kv, D); null = zeros, or not wanted.
struct States {
  float *S, *z;

  TK_DEVICE_METHOD float* matrix(const LinearProblem& p, int64_t n, int h) const {
    return S ? S + (n * p.H_kv + h) * p.D * p.D_v : nullptr;
  }
  TK_DEVICE_METHOD float* vector(const LinearProblem& p, int64_t n, int h) const {
    return z ? z + (n * p.H_kv + h) * p.D : nullptr;
  }
};

// kWidth rows and a slice of the columns of S, or of its transpose. Each warp owns kRows rows.
template <typename Number, int kWidth, bool kTransposed>
struct RunningState {
  static constexpr LinearTile kTile = linear_tile(sizeof(Number), kWidth);
  static constexpr int kRows = kWidth / kTile.warps(), kBlocks = kRows / 16;
  using Tile = SharedTile<Number, kWidth, kTile.slice>;

  // Blocks of 16 rows: products of 32 rows at a time would need more registers than there are.
  Accumulator<1, kTile.slice / 8> blocks[kBlocks];

  TK_DEVICE_METHOD static int first_row(int block) { return warp_index() * kRows + block * 16; }

  // Reads the columns from `column` on of S (D, D_v); null = zeros.
  TK_DEVICE_METHOD void load(const float* S, const LinearProblem& p, int column) {
    for_each([&](int row, int c, float& x) {
      const int at = offset(p, row, column + c);
      x = S && at >= 0 ? S[at] : 0.0f;
    });
  }

  TK_DEVICE_METHOD void store(float* S, const LinearProblem& p, int column) {
    for_each([&](int row, int c, float& x) {
      const int at = offset(p, row, column + c);
      if (at >= 0) S[at] = x;
    });
  }

  TK_DEVICE_METHOD void multiply_by(float factor) {
    for_each([&](int, int, float& x) { x *= factor; });
  }

  TK_DEVICE_METHOD void store_shared(const Tile& tile) const {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      tk::cuda::store_shared(tile, opaque(first_row(n)), 0, blocks[n]);
  }

  // Adds the transpose of b times c.
  template <typename TileB, typename TileC>
  TK_DEVICE_METHOD void add_product(const TileB& b, const TileC& c) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      tk::cuda::add_product<Major::kMN, Major::kMN, TileB::kRows>(blocks[n], b, first_row(n), c, 0);
    }
  }

 private:
  // Calls visit(row, column of the slice, element) for the elements of this lane.
  template <typename Visit>
  TK_DEVICE_METHOD void for_each(const Visit& visit) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      blocks[n].for_each([&](int i, int j, float& x) { visit(first_row(n) + i, j, x); });
    }
  }

  // Place in S; -1 beyond its rows or columns.
  TK_DEVICE_METHOD static int offset(const LinearProblem& p, int row, int column) {
    const int d = kTransposed ? column : row, d_v = kTransposed ? row : column;
    const int D = static_cast<int>(p.D), D_v = static_cast<int>(p.D_v);
    return d < D && d_v < D_v ? d * D_v + d_v : -1;
  }
};

// Multiplies row i of a tile by factor[i].
template <int kThreads, typename Number, int kRows, int kWidth>
TK_DEVICE void multiply_rows(const SharedTile<Number, kRows, kWidth>& tile, const float* factor) {
#pragma unroll 4
  for (int n = opaque(static_cast<int>(threadIdx.x)); n < kRows * kWidth / 2; n += kThreads) {
    const int row = n / (kWidth / 2);
    Number* const x = tile.at(row, n % (kWidth / 2) * 2);
    store_two(x, to_float(x[0]) * factor[row], to_float(x[1]) * factor[row]);
  }
}

}  // namespace tk::cuda
