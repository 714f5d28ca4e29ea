// Each instruction of sm_80 against a scalar computation.
#include "cases.h"

using namespace tk::cuda;

namespace {

struct Buffers {
  float* x = nullptr;
  float* y = nullptr;
  int* count = nullptr;
};

constexpr unsigned kAll = 0xffffffffu;

TK_KERNEL(64, 1) shuffle_kernel(const __grid_constant__ Buffers p) {
  const int t = static_cast<int>(threadIdx.x), lane = t % 32;
  const float x = p.x[t];
  float* y = p.y + t * 8;
  y[0] = __shfl_xor_sync(kAll, x, 5);
  y[1] = __shfl_sync(kAll, x, 7);
  y[2] = __shfl_sync(kAll, x, 3, 8);
  y[3] = __shfl_up_sync(kAll, x, 2);
  y[4] = __shfl_down_sync(kAll, x, 3, 16);
  // Divergent halves of a warp.
  y[5] = lane < 16 ? __shfl_xor_sync(0xffffu, x, 1) : __shfl_xor_sync(0xffff0000u, x, 2);
  y[6] = static_cast<float>(__ballot_sync(kAll, x > 0) >> 3 & 0xffff);
  y[7] = static_cast<float>(__any_sync(kAll, lane == 9) + 2 * __all_sync(kAll, lane >= 0) +
                            4 * __all_sync(kAll, lane > 0));
}

TK_CASE(shuffles) {
  Numbers numbers;
  Array<float> x(64), y(64 * 8);
  fill(x, numbers);
  TK_LAUNCH(shuffle_kernel, dim3(1), 64, 0, nullptr, Buffers{x.on_device(), y.on_device()});
  finish();
  for (int t = 0; t < 64; ++t) {
    const int warp = t & -32, lane = t % 32;
    int positive = 0;
    for (int n = 0; n < 16; ++n) positive |= (x[static_cast<size_t>(warp + n + 3)] > 0) << n;
    const int sources[] = {lane ^ 5,
                           7,
                           (lane & -8) + 3,
                           lane < 2 ? lane : lane - 2,
                           lane % 16 + 3 > 15 ? lane : lane + 3,
                           lane < 16 ? lane ^ 1 : lane ^ 2};
    const float* mine = y.data() + t * 8;
    for (int n = 0; n < 6; ++n) {
      expect_equal(mine[n], x[static_cast<size_t>(warp + sources[n])],
                   "shuffle " + std::to_string(n));
    }
    expect_equal(mine[6], positive, "ballot");
    expect_equal(mine[7], 1 + 2, "any, all");
  }
}

TK_KERNEL(128, 1) barrier_kernel(const __grid_constant__ Buffers p) {
  TK_SHARED_MEMORY(shared);
  float* numbers = reinterpret_cast<float*>(shared);
  const int t = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
  numbers[t] = p.x[block * 128 + t];
  for (int half = 64; half > 0; half /= 2) {
    __syncthreads();
    if (t < half) numbers[t] += numbers[t + half];
  }
  if (t == 0) p.y[block] = numbers[0];
  if (t % 2) atomicAdd(p.count, block + 1);
}

TK_CASE(barriers_and_atomics) {
  constexpr int kBlocks = 5;
  Array<float> x(128 * kBlocks), y(kBlocks);
  Array<int> count(1);
  for (size_t n = 0; n < x.size(); ++n) x[n] = static_cast<float>(n % 37);
  TK_LAUNCH(barrier_kernel, dim3(kBlocks), 128, 512, nullptr,
            Buffers{x.on_device(), y.on_device(), count.on_device()});
  finish();
  for (size_t block = 0; block < kBlocks; ++block) {
    float sum = 0;
    for (size_t n = 0; n < 128; ++n) sum += x[block * 128 + n];
    expect_equal(y[block], sum, "sum of a block");
  }
  expect_equal(count[0], 64 * (1 + 2 + 3 + 4 + 5), "count");
}

TK_KERNEL(32, 1) grid_kernel(const __grid_constant__ Buffers p) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  if (threadIdx.x == 0) p.y[block] = static_cast<float>(block * 1000 + gridDim.y + blockDim.x);
}

TK_CASE(grids) {
  Array<float> y(2 * 3 * 4);
  TK_LAUNCH(grid_kernel, dim3(2, 3, 4), 32, 0, nullptr, Buffers{nullptr, y.on_device()});
  finish();
  for (size_t n = 0; n < y.size(); ++n) {
    expect_equal(y[n], static_cast<double>(n * 1000 + 3 + 32), "block");
  }
}

// Semaphore between blocks: block n waits for block n + 1, which may start later.
TK_KERNEL(32, 1) semaphore_kernel(const __grid_constant__ Buffers p) {
  const int expected = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  if (threadIdx.x == 0) {
    while (load_acquire(p.count) != expected) {
    }
  }
  __syncwarp();
  p.y[threadIdx.x] = p.y[threadIdx.x] * 2 + static_cast<float>(blockIdx.x);
  __syncwarp();
  if (threadIdx.x == 0) add_release(p.count, 1);
}

TK_CASE(semaphores) {
  Array<float> y(32);
  Array<int> count(1);
  TK_LAUNCH(semaphore_kernel, dim3(6), 32, 0, nullptr,
            Buffers{nullptr, y.on_device(), count.on_device()});
  finish();
  float expected = 0;
  for (int block = 5; block >= 0; --block) expected = expected * 2 + static_cast<float>(block);
  for (const float value : y) expect_equal(value, expected, "result");
}

struct Tile {
  const uint16_t* x;
  uint32_t* y;
};

template <bool kTransposed>
TK_KERNEL(32, 1)
load_kernel(const __grid_constant__ Tile p) {
  TK_SHARED_MEMORY(shared);
  const int lane = static_cast<int>(threadIdx.x);
  copy_async_16(shared + lane * 16, p.x + lane * 8, lane != 13);
  commit_copies();
  wait_copies<0>();
  __syncwarp();
  uint32_t x[4];
  if (kTransposed) {
    load_matrices_transposed(x, shared + lane * 16);
  } else {
    load_matrices(x, shared + lane * 16);
  }
  for (int n = 0; n < 4; ++n) p.y[lane * 4 + n] = x[n];
}

// PTX manual, ldmatrix: of matrix n, lane l receives row l / 4, columns 2 (l % 4) and the next;
// transposed, column l / 4, rows 2 (l % 4) and the next.
template <bool kTransposed>
void matrix_loads() {
  Array<uint16_t> x(32 * 8);
  Array<uint32_t> y(128);
  for (size_t n = 0; n < 256; ++n) x[n] = static_cast<uint16_t>(n * 257);
  TK_LAUNCH(load_kernel<kTransposed>, dim3(1), 32, 512, nullptr,
            Tile{x.on_device(), y.on_device()});
  finish();
  memset(&x[13 * 8], 0, 16);
  for (size_t lane = 0; lane < 32; ++lane) {
    for (size_t n = 0; n < 4; ++n) {
      for (size_t part = 0; part < 2; ++part) {
        size_t row = lane / 4, column = lane % 4 * 2 + part;
        if (kTransposed) std::swap(row, column);
        expect_equal(y[lane * 4 + n] >> 16 * part & 0xffff, x[(n * 8 + row) * 8 + column],
                     "lane " + std::to_string(lane));
      }
    }
  }
}

TK_CASE(matrix_loads) { matrix_loads<false>(); }
TK_CASE(matrix_loads_transposed) { matrix_loads<true>(); }

struct Products {
  const uint32_t* a;
  const uint32_t* b;
  float* c;
};

template <typename Element>
TK_KERNEL(32, 1)
product_kernel(const __grid_constant__ Products p) {
  const int lane = static_cast<int>(threadIdx.x);
  uint32_t a[4];
  for (int n = 0; n < 4; ++n) a[n] = p.a[lane * 4 + n];
  float c[4];
  for (int n = 0; n < 4; ++n) c[n] = p.c[lane * 4 + n];
  multiply_accumulate(c, a, p.b[lane * 2], p.b[lane * 2 + 1], Element{});
  for (int n = 0; n < 4; ++n) p.c[lane * 4 + n] = c[n];
}

// PTX manual, mma.m16n8k16, with group = lane / 4 and member = lane % 4:
//   a_i: row = group for i in {0, 1, 4, 5}, else group + 8;
//        column = member * 2 + (i & 1), and 8 more for i >= 4
//   b_i: row = member * 2 + (i & 1), and 8 more for i >= 2; column = group
//   c_i: row = group for i < 2, else group + 8; column = member * 2 + (i & 1)
template <typename Element>
void products() {
  Numbers numbers;
  Element a[16][16], b[16][8];
  for (auto& row : a) fill(row, numbers);
  for (auto& row : b) fill(row, numbers);
  Array<uint32_t> a_lanes(32 * 4), b_lanes(32 * 2);
  Array<float> c_lanes(32 * 4);
  for (size_t lane = 0; lane < 32; ++lane) {
    const size_t group = lane / 4, member = lane % 4;
    for (size_t i = 0; i < 8; ++i) {
      const size_t row = i == 0 || i == 1 || i == 4 || i == 5 ? group : group + 8;
      const uint32_t bits = a[row][member * 2 + (i & 1) + (i >= 4 ? 8 : 0)].bits;
      a_lanes[lane * 4 + i / 2] |= bits << (i & 1) * 16;
    }
    for (size_t i = 0; i < 4; ++i) {
      const uint32_t bits = b[member * 2 + (i & 1) + (i >= 2 ? 8 : 0)][group].bits;
      b_lanes[lane * 2 + i / 2] |= bits << (i & 1) * 16;
      c_lanes[lane * 4 + i] = static_cast<float>(lane + i);
    }
  }
  TK_LAUNCH(product_kernel<Element>, dim3(1), 32, 0, nullptr,
            Products{a_lanes.on_device(), b_lanes.on_device(), c_lanes.on_device()});
  finish();
  for (size_t lane = 0; lane < 32; ++lane) {
    for (size_t i = 0; i < 4; ++i) {
      const size_t row = i < 2 ? lane / 4 : lane / 4 + 8, column = lane % 4 * 2 + (i & 1);
      double sum = static_cast<double>(lane + i);
      for (int k = 0; k < 16; ++k) sum += double(value_of(a[row][k])) * value_of(b[k][column]);
      expect_near(c_lanes[lane * 4 + i], sum, 1e-5, "c");
    }
  }
}

TK_CASE(products_half) { products<Half>(); }
TK_CASE(products_bfloat16) { products<BFloat16>(); }

#ifndef __CUDACC__

// Round trip of all 65536 bit patterns, and rounding to nearest even at and around each midpoint.
template <typename Element>
void conversions() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Element x{static_cast<uint16_t>(bits)};
    const float value = to_float(x);
    const uint16_t back = to_element<Element>(value).bits;
    if (std::isnan(value)) {
      expect_equal(back, 0x7fff, "NaN");
      continue;
    }
    expect_equal(back, bits, "round trip");
    if (bits & 0x8000 || std::isinf(value)) continue;
    const float next = to_float(Element{static_cast<uint16_t>(bits + 1)});
    const float bound = std::isinf(next)
                            ? value + (value - to_float(Element{static_cast<uint16_t>(bits - 1)}))
                            : next;
    const float middle = static_cast<float>((double(value) + double(bound)) / 2);
    if (std::isinf(middle)) continue;
    const uint32_t even = bits + (bits & 1);
    expect_equal(to_element<Element>(middle).bits, even, "midpoint");
    expect_equal(to_element<Element>(std::nextafterf(middle, 0)).bits, bits, "below the midpoint");
    expect_equal(to_element<Element>(std::nextafterf(middle, INFINITY)).bits, bits + 1,
                 "above the midpoint");
  }
  expect_equal(pack(1, -2, Element{}),
               to_element<Element>(1).bits | uint32_t{to_element<Element>(-2).bits} << 16, "pack");
  expect_equal(to_element<Element>(INFINITY).bits, std::is_same_v<Element, Half> ? 0x7c00 : 0x7f80,
               "infinity");
}

TK_CASE(conversions_half) { conversions<Half>(); }
TK_CASE(conversions_bfloat16) { conversions<BFloat16>(); }

TK_CASE(known_values) {
  expect_equal(to_float(Half{0x3c00}), 1, "1");
  expect_equal(to_float(Half{0xc000}), -2, "-2");
  expect_equal(to_float(Half{0x7bff}), 65504, "largest");
  expect_equal(to_float(Half{0x0400}), 0x1p-14, "smallest normal");
  expect_equal(to_float(Half{0x0001}), 0x1p-24, "smallest");
  expect_equal(to_float(BFloat16{0x3f80}), 1, "1");
  expect_equal(to_float(BFloat16{0x4049}), 3.140625, "3.140625");
  expect_equal(exp2_approx(3), 8, "2^3");
  expect_equal(exp2_approx(-130), 0, "2^-130");
}

#endif

}  // namespace
