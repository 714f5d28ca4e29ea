// c = a b^T with two cp.async stages, ldmatrix and mma, and variants with one defect each.
#include "cases.h"

using namespace tk::cuda;

namespace {

constexpr int kRows = 64;   // of a and of b
constexpr int kDepth = 32;  // k extent of a stage, in elements: rows of 64 bytes
constexpr int kStages = 2;
constexpr int kTileBytes = kRows * kDepth * 2;
constexpr int kPitch = kRows + 4;  // of c in shared memory, in elements
constexpr size_t kSharedBytes = kStages * 2 * kTileBytes;
static_assert(kSharedBytes <= kRows * kPitch * sizeof(float));

struct Params {
  const Half* a;  // (64, K)
  const Half* b;  // (64, K)
  float* c;       // (64, 64)
  float* sums;    // of rows of c
  int K;          // a multiple of 8
};

// Swizzled byte offset: the 16-byte chunks of eight rows are in different banks.
TK_DEVICE int swizzled_offset(int row, int chunk) {
  return row * 64 + (chunk ^ (row / 2 & 3)) * 16;
}

TK_DEVICE void copy_stage(const Params& p, unsigned char* stage, int k0) {
  for (int n = static_cast<int>(threadIdx.x); n < kRows * 4; n += 128) {
    const int row = n / 4, chunk = n % 4, k = k0 + chunk * 8;
    const bool there = k < p.K || has_defect("no_tail_mask");
    copy_async_16(stage + swizzled_offset(row, chunk), p.a + row * p.K + k, there);
    copy_async_16(stage + kTileBytes + swizzled_offset(row, chunk), p.b + row * p.K + k, there);
  }
  if (!has_defect("no_commit")) commit_copies();
}

// Each warp computes 16 rows; c[n] holds columns 8 n to 8 n + 7.
TK_DEVICE void multiply_stage(const unsigned char* stage, float (&c)[8][4]) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  for (int k = 0; k < kDepth / 8; k += 2) {
    uint32_t a[4];
    const int row = warp * 16 + lane % 16, chunk = k + lane / 16;
    const bool plain = has_defect("other_swizzle");
    load_matrices(a, stage + (plain ? row * 64 + chunk * 16 : swizzled_offset(row, chunk)));
    for (int n = 0; n < 8; n += 2) {
      uint32_t b[4];
      const int column = n * 8 + lane % 8 + lane / 16 * 8;
      load_matrices(b, stage + kTileBytes + swizzled_offset(column, k + lane / 8 % 2));
      multiply_accumulate(c[n], a, b[0], b[1], Half{});
      multiply_accumulate(c[n + 1], a, b[2], b[3], Half{});
    }
  }
}

TK_DEVICE void wait_for_stage(bool last) {
  if (has_defect("no_wait")) return;
  const int pending = (last ? 0 : 1) + has_defect("wait_for_one_less");
  if (pending == 0) wait_copies<0>();
  if (pending == 1) wait_copies<1>();
  if (pending == 2) wait_copies<2>();
}

TK_KERNEL(128, 1) product_kernel(const __grid_constant__ Params p) {
  TK_SHARED_MEMORY(shared);
  const int t = static_cast<int>(threadIdx.x), lane = t % 32, warp = t / 32;
  float c[8][4] = {};
  copy_stage(p, shared, 0);
  for (int k = 0, stage = 0; k < p.K; k += kDepth, stage ^= 1) {
    const bool last = k + kDepth >= p.K;
    if (!last) copy_stage(p, shared + (stage ^ 1) * 2 * kTileBytes, k + kDepth);
    wait_for_stage(last);
    if (!has_defect("no_barrier_after_wait")) __syncthreads();
    multiply_stage(shared + stage * 2 * kTileBytes, c);
    if (!has_defect("no_barrier_before_copy")) __syncthreads();
  }
  float* rows = reinterpret_cast<float*>(shared);
  for (int n = 0; n < 8; ++n) {
    for (int i = 0; i < 4; ++i) {
      const int row = warp * 16 + lane / 4 + i / 2 * 8;
      rows[row * kPitch + n * 8 + lane % 4 * 2 + i % 2] = c[n][i];
    }
  }
  if (!has_defect("no_barrier_in_epilogue")) __syncthreads();
  for (int n = t; n < kRows * kRows; n += 128) {
    p.c[n] = rows[n / kRows * kPitch + n % kRows];
  }
  for (int half = 0; half < 2; ++half) {
    float sum = 0;
    for (int n = 0; n < 8; ++n) sum += c[n][half * 2] + c[n][half * 2 + 1];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    if (!has_defect("no_shuffle")) sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (lane % 4 == 0) p.sums[warp * 16 + lane / 4 + half * 8] = sum;
  }
}

TK_CASE(product) {
  constexpr int K = 72;
  Numbers numbers;
  // NaN after the last row, which a missing tail mask reads.
  Array<Half> a(kRows * K + 64, Half{0x7fff}), b = a;
  for (size_t n = 0; n < kRows * K; ++n) {
    a[n] = rounded<Half>(numbers.next());
    b[n] = rounded<Half>(numbers.next());
  }
  Array<float> c(kRows * kRows, NAN), sums(kRows, NAN);
  TK_LAUNCH(product_kernel, dim3(1), 128, kRows * kPitch * sizeof(float), nullptr,
            Params{a.on_device(), b.on_device(), c.on_device(), sums.on_device(), K});
  finish();
  for (size_t row = 0; row < kRows; ++row) {
    double total = 0;
    for (size_t column = 0; column < kRows; ++column) {
      const double sum = dot(&a[row * K], &b[column * K], K);
      expect_near(c[row * kRows + column], sum, 1e-4, "c");
      total += sum;
    }
    expect_near(sums[row], total, 1e-3, "the sum of a row");
  }
}

}  // namespace
