// The instructions of sm_90 other than wgmma, against scalar computations.
#include "cases.h"
#include "cuda/platform/sm90_ptx.h"
#include "cuda/sm90/exp2_polynomial.cuh"

using namespace tk::cuda;

namespace {

struct TensorParams {
  TensorMap from, to;
  unsigned char* bytes;  // shared-memory image of the box
  int load_at[5], store_at[5], rank, box_bytes;
};

template <int kRank>
TK_DEVICE void copy_box(const TensorParams& p, unsigned char* box, uint64_t* barrier, bool load) {
  int at[kRank];
  for (int n = 0; n < kRank; ++n) at[n] = load ? p.load_at[n] : p.store_at[n];
  if (load) {
    load_tensor(box, p.from, barrier, at);
  } else {
    store_tensor(p.to, box, at);
  }
}

TK_DEVICE void copy_box(const TensorParams& p, unsigned char* box, uint64_t* barrier, bool load) {
  if (p.rank == 1) copy_box<1>(p, box, barrier, load);
  if (p.rank == 2) copy_box<2>(p, box, barrier, load);
  if (p.rank == 3) copy_box<3>(p, box, barrier, load);
  if (p.rank == 4) copy_box<4>(p, box, barrier, load);
  if (p.rank == 5) copy_box<5>(p, box, barrier, load);
}

TK_KERNEL(64, 1) tensor_kernel(const __grid_constant__ TensorParams p) {
  TK_SHARED_MEMORY(raw);
  unsigned char* shared = align_to(raw, 1024);
  auto* barrier = reinterpret_cast<uint64_t*>(shared + p.box_bytes);
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (t == 0) {
    mbarrier_arrive_expect(barrier, static_cast<uint32_t>(p.box_bytes));
    copy_box(p, shared, barrier, true);
  }
  mbarrier_wait(barrier, 0);
  for (int n = t; n < p.box_bytes; n += 64) p.bytes[n] = shared[n];
  __syncthreads();
  if (t == 32) {
    copy_box(p, shared, barrier, false);
    commit_stores();
    wait_stores_read<0>();
    wait_stores<0>();
  }
}

template <typename T>
T number(int n) {
  if constexpr (sizeof(T) == 4) {
    return static_cast<T>(n);
  } else {
    return rounded<T>(static_cast<float>(n % 64));
  }
}

// Loads a box that is partly outside of the tensor, and stores it to a second tensor, partly past
// its end. The coordinates of a store must not be negative.
template <typename T>
void tensor_copy(TensorType type, int rank, Swizzle swizzle) {
  const int inner = swizzle == Swizzle::kNone ? 16 : row_chunks(swizzle) * 16 / int{sizeof(T)};
  const int sizes[5] = {inner + 8, 5, 4, 3, 3}, boxes[5] = {inner, 4, 3, 2, 2};
  const int load_at[5] = {rank % 2 ? -8 : 16, 2, -1, 2, 1}, store_at[5] = {16, 0, 1, 2, 0};
  TensorBox box{};
  box.type = type, box.rank = rank, box.swizzle = swizzle;
  size_t stride = sizeof(T), box_count = 1;
  TensorParams p{};
  p.rank = rank;
  for (int n = 0; n < rank; ++n) {
    box.size[n] = static_cast<uint64_t>(sizes[n]);
    box.stride[n] = stride;
    box.box[n] = static_cast<uint32_t>(boxes[n]);
    stride = stride * static_cast<size_t>(sizes[n]);
    stride = (stride + 15) / 16 * 16 + 16;
    box_count *= static_cast<size_t>(boxes[n]);
    p.load_at[n] = load_at[n];
    p.store_at[n] = store_at[n];
  }
  const size_t count = stride / sizeof(T);
  Array<T> from(count), to(count);
  for (size_t n = 0; n < count; ++n) {
    from[n] = number<T>(static_cast<int>(n) + 1);
    to[n] = number<T>(-1);
  }
  p.box_bytes = static_cast<int>(box_count * sizeof(T));
  Array<T> bytes(box_count);
  p.bytes = reinterpret_cast<unsigned char*>(bytes.on_device());
  const auto map = [&box](void* data) {
    box.data = data;
    return encode(box);
  };
  p.from = map(from.on_device()), p.to = map(to.on_device());
  TK_LAUNCH(tensor_kernel, dim3(1), 64, static_cast<size_t>(p.box_bytes) + 1024 + 8, nullptr, p);
  finish();

  std::vector<float> to_expected(count, value_of(number<T>(-1)));
  // Index of element n of a box that starts `at`, in elements of the tensor; `count` if outside.
  const auto index_of = [&](size_t n, const int (&at)[5]) {
    size_t index = 0;
    for (int d = 0; d < rank; ++d) {
      const int place = at[d] + static_cast<int>(n % static_cast<size_t>(boxes[d]));
      n /= static_cast<size_t>(boxes[d]);
      if (place < 0 || place >= sizes[d]) return count;
      index += static_cast<size_t>(place) * box.stride[d] / sizeof(T);
    }
    return index;
  };
  for (size_t n = 0; n < box_count; ++n) {
    const size_t row = n / static_cast<size_t>(inner), column = n % static_cast<size_t>(inner);
    size_t place = n;
    if (swizzle != Swizzle::kNone) {
      const int chunk = static_cast<int>(column * sizeof(T) / 16);
      place = static_cast<size_t>(swizzled(swizzle, static_cast<int>(row), chunk)) / sizeof(T) +
              column % (16 / sizeof(T));
    }
    const size_t loaded = index_of(n, load_at), stored = index_of(n, store_at);
    const float value = loaded < count ? value_of(from[loaded]) : 0;
    expect_equal(value_of(bytes[place]), value, "element " + std::to_string(n) + " of the box");
    if (stored < count) to_expected[stored] = value;
  }
  for (size_t n = 0; n < count; ++n) {
    expect_equal(value_of(to[n]), to_expected[n], "stored " + std::to_string(n));
  }
}

TK_CASE(tensor_copies) {
  for (int rank = 1; rank <= 5; ++rank) {
    for (const Swizzle swizzle : {Swizzle::kNone, Swizzle::k32, Swizzle::k64, Swizzle::k128}) {
      tensor_copy<Half>(TensorType::kHalf, rank, swizzle);
      tensor_copy<BFloat16>(TensorType::kBFloat16, rank, swizzle);
      tensor_copy<float>(TensorType::kFloat, rank, swizzle);
    }
  }
}

#ifndef __CUDACC__

TK_CASE(refused_tensor_maps) {
  alignas(16) float data[64];
  const TensorBox valid{data, TensorType::kFloat, 2, {8, 8}, {4, 32}, {8, 8}, Swizzle::k32};
  const auto refuse = [&](auto change, const std::string& why) {
    TensorBox box = valid;
    change(box);
    try {
      encode(box);
    } catch (const std::runtime_error& error) {
      expect(std::string(error.what()).find(why) != std::string::npos, error.what());
      return;
    }
    expect(false, "no error: " + why);
  };
  encode(valid);
  refuse([&](TensorBox& box) { box.data = data + 1; }, "the data address is not a multiple of 16");
  refuse([](TensorBox& box) { box.rank = 6; }, "rank 6");
  refuse([](TensorBox& box) { box.size[1] = 0; }, "size 0 of dimension 1");
  refuse([](TensorBox& box) { box.stride[1] = 40; }, "stride 40 of dimension 1");
  refuse([](TensorBox& box) { box.box[1] = 257; }, "box 257 of dimension 1");
  refuse([](TensorBox& box) { box.box[0] = 2; }, "rows of 8 bytes");
  refuse([](TensorBox& box) { box.swizzle = Swizzle::k64; }, "rows of 32 bytes, swizzled by 64");
}

#endif

struct BulkParams {
  const float* from;
  float* sum;
};

TK_KERNEL(32, 1) bulk_kernel(const __grid_constant__ BulkParams p) {
  TK_SHARED_MEMORY(shared);
  auto* barrier = reinterpret_cast<uint64_t*>(shared + 512);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect(barrier, 512);
    load_bulk(shared, p.from, 512, barrier);
    mbarrier_wait(barrier, 0);
    reinterpret_cast<float*>(shared)[5] += 100;
    fence_async();
    add_bulk(p.sum, shared, 256);
    commit_stores();
    add_bulk(p.sum + 64, shared + 256, 256);
    commit_stores();
    wait_stores_read<1>();
    wait_stores_read<0>();
  }
  add_to(p.sum + 4 * threadIdx.x, make_float4(1, 2, 3, 4));
}

TK_CASE(bulk_copies) {
  Array<float> from(128), sum(128, 3.f);
  for (size_t n = 0; n < 128; ++n) from[n] = static_cast<float>(n);
  TK_LAUNCH(bulk_kernel, dim3(2), 32, 520, nullptr, BulkParams{from.on_device(), sum.on_device()});
  finish();
  for (size_t n = 0; n < 128; ++n) {
    const float value = static_cast<float>(n == 5 ? 105 : n);
    expect_equal(sum[n], 3 + 2 * (value + static_cast<float>(n % 4 + 1)), "added");
  }
}

struct Output {
  float* y;
};

// Warps 0 to 2 update a number in turn, synchronised by two mbarriers, for six phases. Warp 3 waits
// for the phase before the first, which counts as complete.
TK_KERNEL(128, 1) phase_kernel(const __grid_constant__ Output p) {
  TK_SHARED_MEMORY(shared);
  auto* barriers = reinterpret_cast<uint64_t*>(shared);
  auto* numbers = reinterpret_cast<float*>(shared + 64);
  const int t = static_cast<int>(threadIdx.x), warp = t / 32;
  if (t == 0) {
    mbarrier_init(barriers, 64);
    mbarrier_init(barriers + 1, 32);
    numbers[0] = 1;
  }
  __syncthreads();
  if (warp < 2) {
    for (uint32_t round = 0; round < 6; ++round) {
      if (t == 32) numbers[0] *= 2;
      mbarrier_arrive(barriers);
      mbarrier_wait(barriers + 1, round & 1);
    }
  } else if (warp == 2) {
    for (uint32_t round = 0; round < 6; ++round) {
      while (!mbarrier_try_wait(barriers, round & 1)) {
      }
      if (t == 64) numbers[0] += 1;
      mbarrier_arrive(barriers + 1);
    }
  } else {
    mbarrier_wait(barriers, 1);
  }
  named_barrier_arrive(2, 128);
  if (warp == 0) {
    named_barrier_arrive(3, 64);
  } else if (warp == 1) {
    named_barrier_sync(3, 64);
  }
  __syncthreads();
  if (t == 0) p.y[0] = numbers[0];
}

TK_CASE(phases) {
  Array<float> y(1);
  float expected = 1;
  TK_LAUNCH(phase_kernel, dim3(1), 128, 128, nullptr, Output{y.on_device()});
  finish();
  for (int round = 0; round < 6; ++round) expected = expected * 2 + 1;
  expect_equal(y[0], expected, "number");
}

TK_KERNEL(384, 1) register_kernel(const __grid_constant__ Output p) {
  if (threadIdx.x < 128) {
    release_registers<40>();
  } else {
    request_registers<232>();
  }
  const bool elected = elect_one();
  if (elected) atomicAdd(p.y, 1.f);
  for (int round = 0; round < 4; ++round) {
    if (elect_one() != elected) atomicAdd(p.y, 1000.f);  // another lane than before
  }
}

TK_CASE(registers_and_elect) {
  Array<float> y(1);
  TK_LAUNCH(register_kernel, dim3(2), 384, 0, nullptr, Output{y.on_device()});
  finish();
  expect_equal(y[0], 24, "elected lanes");
}

TK_KERNEL(32, 1) store_kernel(const __grid_constant__ Output p) {
  TK_SHARED_MEMORY(shared);
  const int lane = static_cast<int>(threadIdx.x);
  uint32_t x[4], y[4];
  for (int n = 0; n < 4; ++n) x[n] = static_cast<uint32_t>(lane * 4 + n) * 0x10001u + 0x10000u;
  store_matrices(shared + lane * 16, x);
  __syncwarp();
  load_matrices(y, shared + lane * 16);
  for (int n = 0; n < 4; ++n) p.y[lane * 4 + n] = static_cast<float>(x[n] == y[n]);
}

TK_CASE(matrix_stores) {
  Array<float> y(128);
  TK_LAUNCH(store_kernel, dim3(1), 32, 512, nullptr, Output{y.on_device()});
  finish();
  for (const float same : y) expect_equal(same, 1, "round trip");
}

struct Exponents {
  float *x, *y;
};

TK_KERNEL(256, 1) exponential_kernel(const __grid_constant__ Exponents p) {
  const auto n = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  p.y[n] = sm90::exp2_polynomial(p.x[n]);
}

TK_CASE(exponentials) {
  constexpr int kCount = 4096;
  Array<float> x(kCount), y(kCount);
  for (int n = 0; n < kCount; ++n) x[n] = 4 - 130 * static_cast<float>(n) / kCount;
  x[0] = NAN, x[1] = -INFINITY, x[2] = -126.75f, x[3] = -1e30f, x[4] = 0.5f, x[5] = -0.5f;
  TK_LAUNCH(exponential_kernel, dim3(kCount / 256), 256, 0, nullptr,
            Exponents{x.on_device(), y.on_device()});
  finish();
  expect_equal(std::isnan(y[0]), 1, "NaN");
  for (int n = 1; n < 4; ++n) expect_equal(y[n], 0, "underflow");
  for (int n = 4; n < kCount; ++n) {
    const double exact = std::exp2(static_cast<double>(x[n]));
    expect_near(y[n], exact, 8e-5 * exact, "2^x");
  }
}

}  // namespace
