// States: in memory, summed in registers, and as operands of products.
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

// kWidth rows and a slice of the columns of S, in registers. Each warp owns kRows rows.
template <typename Number, int kWidth>
struct RunningState {
  static constexpr LinearTile kTile = linear_tile(sizeof(Number), kWidth);
  static constexpr int kRows = kWidth / kTile.warps(), kBlocks = kRows / 16;
  static constexpr int kSlice = kTile.state_slice(kWidth);

  // Blocks of 16 rows: products of 32 rows at a time would need more registers than there are.
  Accumulator<1, kSlice / 8> blocks[kBlocks];

  TK_DEVICE_METHOD static int first_row(int block) { return warp_index() * kRows + block * 16; }

  TK_DEVICE_METHOD void clear() {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) blocks[n].clear();
  }

  // Writes the columns from `column` on of S (D, D_v).
  TK_DEVICE_METHOD void store(float* S, const LinearProblem& p, int column) {
    const int D = static_cast<int>(p.D), D_v = static_cast<int>(p.D_v);
    for_each([&](int row, int c, float& x) {
      if (row < D && column + c < D_v) S[row * D_v + column + c] = x;
    });
  }

  TK_DEVICE_METHOD void multiply_by(float factor) {
    for_each([&](int, int, float& x) { x *= factor; });
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
};

// Reads the columns from `column` on of S (D, D_v), or of its transpose, into a tile; 0 beyond its
// rows and columns, and if S is null.
template <int kThreads, bool kTransposed, typename Number, int kRows, int kWidth>
TK_DEVICE void load_matrix(const SharedTile<Number, kRows, kWidth>& tile, const float* S,
                           const LinearProblem& p, int column) {
  const int D = static_cast<int>(p.D), D_v = static_cast<int>(p.D_v);
  const auto element = [&](int row, int c) {
    const int d = kTransposed ? column + c : row, d_v = kTransposed ? row : column + c;
    return S && d < D && d_v < D_v ? S[d * D_v + d_v] : 0.0f;
  };
#pragma unroll 8
  for (int n = opaque(static_cast<int>(threadIdx.x)); n < kRows * kWidth / 2; n += kThreads) {
    const int row = kTransposed ? n % kRows : n / (kWidth / 2);  // lanes read adjacent elements
    const int c = 2 * (kTransposed ? n / kRows : n % (kWidth / 2));
    store_two(tile.at(row, c), element(row, c), element(row, c + 1));
  }
}

}  // namespace tk::cuda
