// Invalid kernels for sm_90, which hang, fault or compute garbage on a GPU.
#include "cases.h"
#include "cuda/platform/sm90_wgmma.h"

using namespace tk::cuda;

namespace {

constexpr int kBytes = 8192;

struct Params {
  TensorMap map;     // (64, 32) floats, boxes of (8, 32)
  TensorMap ragged;  // columns 0 to 29 of the same
  float* data;
};

struct Thread {
  unsigned char* shared;
  uint64_t* barrier;  // expects one arrival
  int index;
};

using Body = void (*)(const Params&, const Thread&);

template <Body kBody>
TK_KERNEL(128, 1)
kernel(const __grid_constant__ Params p) {
  TK_SHARED_MEMORY(raw);
  unsigned char* shared = align_to(raw, 1024);
  const Thread t{shared, reinterpret_cast<uint64_t*>(shared + kBytes),
                 static_cast<int>(threadIdx.x)};
  if (threadIdx.x == 0) {
    mbarrier_init(t.barrier, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  kBody(p, t);
}

struct alignas(16) Four {
  float x[4];
};

template <Body kBody>
void launch() {
  std::vector<Four> data(64 * 32 / 4, Four{});
  const auto map = [&](uint64_t columns) {
    return encode(
        {data.data(), TensorType::kFloat, 2, {columns, 64}, {4, 128}, {32, 8}, Swizzle::kNone});
  };
  TK_LAUNCH(kernel<kBody>, dim3(2), 128, kBytes + 1024 + 8, nullptr,
            Params{map(32), map(30), data[0].x});
  expect(!std::isnan(data.back().x[3]), "NaN was read");
}

TK_DEVICE void load(const Params& p, const Thread& t, int byte) {
  mbarrier_arrive_expect(t.barrier, 1024);
  load_tensor(t.shared + byte, p.map, t.barrier, {0, 0});
}

TK_DEVICE void store(const Params& p, const Thread& t) {
  for (int n = 0; n < 256; ++n) reinterpret_cast<float*>(t.shared)[n] = 1;
  fence_async();
  store_tensor(p.map, t.shared, {0, 8 * static_cast<int>(blockIdx.x)});
  commit_stores();
}

TK_BODY(correct) {
  if (t.index == 0) load(p, t, 0);
  mbarrier_wait(t.barrier, 0);
  __syncthreads();
  if (t.index == 0) {
    store(p, t);
    wait_stores_read<0>();
  }
}

TK_BODY(no_mbarrier) {
  if (t.index == 5) mbarrier_arrive(t.barrier - 1);
}

TK_BODY(second_init) {
  if (t.index == 5) mbarrier_init(t.barrier, 1);
}

TK_BODY(overwritten_mbarrier) {
  if (t.index == 5) {
    *t.barrier = 0;
    mbarrier_arrive(t.barrier);
  }
}

TK_BODY(second_arrival) {
  if (t.index < 2) mbarrier_arrive_expect(t.barrier, 16);
}

TK_BODY(misaligned_box) {
  if (t.index == 0) load(p, t, 64);
}

TK_BODY(box_past_end) {
  if (t.index == 0) load(p, t, kBytes);
}

TK_BODY(wrong_rank) {
  if (t.index == 0) load_tensor(t.shared, p.map, t.barrier, {0, 0, 0});
}

TK_BODY(column_of_8_bytes) {
  if (t.index == 0) load_tensor(t.shared, p.map, t.barrier, {2, 0});
}

TK_BODY(store_of_ragged_rows) {
  if (t.index == 0) store_tensor(p.ragged, t.shared, {0, 0});
}

TK_BODY(store_before_the_first_row) {
  if (t.index == 0) store_tensor(p.map, t.shared, {0, -8});
}

TK_BODY(invalid_tensor_map) {
  TensorMap map = p.map;
  map.words[15] = 0;
  if (t.index == 0) load_tensor(t.shared, map, t.barrier, {0, 0});
}

TK_BODY(bulk_of_12_bytes) {
  if (t.index == 0) load_bulk(t.shared, p.data, 12, t.barrier);
}

TK_BODY(exit_before_load_arrives) {
  if (t.index == 0) load(p, t, 0);
}

// The destination of a load is undefined from its issue on.
TK_BODY(read_before_load) {
  float* const numbers = reinterpret_cast<float*>(t.shared);
  if (t.index != 0) return;
  numbers[7] = 1;
  fence_async();
  load(p, t, 0);
  p.data[2047] = numbers[7];
  mbarrier_wait(t.barrier, 0);
}

TK_BODY(store_source_changed) {
  if (t.index == 0) {
    store(p, t);
    t.shared[77] += 1;
    wait_stores_read<0>();
  }
}

TK_BODY(store_without_commit) {
  if (t.index == 0) {
    store_tensor(p.map, t.shared, {0, 0});
    wait_stores_read<0>();
  }
}

TK_BODY(barrier_of_40_threads) { named_barrier_sync(1, 40); }

TK_BODY(barrier_16) { named_barrier_sync(16, 128); }

TK_BODY(barrier_with_two_counts) { named_barrier_sync(1, t.index < 64 ? 128 : 96); }

TK_BODY(request_fewer_registers) { request_registers<40>(); }

TK_BODY(release_to_more_registers) {
  release_registers<40>();
  release_registers<48>();
}

TK_DEVICE uint64_t descriptor(const Thread& t, int byte) {
  return matrix_descriptor(t.shared + byte, 16, 1024, Swizzle::k128);
}

TK_DEVICE void product(const Thread& t, float (&c)[16], int byte, bool accumulate) {
  wgmma_fence();
  wgmma<Major::kK, Major::kK>(c, descriptor(t, 0), descriptor(t, byte), Half{}, accumulate);
  wgmma_commit();
}

TK_BODY(wgmma_by_one_warp) {
  float c[16];
  if (t.index >= 32) return;
  product(t, c, 0, false);
  wgmma_wait<0>();
}

TK_BODY(wgmma_with_divergent_operands) {
  float c[16];
  product(t, c, t.index % 32 == 9 ? 4096 : 0, false);
  wgmma_wait<0>();
}

TK_BODY(wgmma_with_divergent_scale) {
  float c[16] = {};
  product(t, c, 0, t.index < 96);
  wgmma_wait<0>();
}

TK_BODY(wgmma_past_end) {
  float c[16];
  product(t, c, kBytes - 1024, false);
  wgmma_wait<0>();
}

TK_BODY(wgmma_inside_swizzle_pattern) {
  float c[16];
  product(t, c, 128, false);
  wgmma_wait<0>();
}

// Accumulator registers must not be touched before the wait.
TK_BODY(accumulator_scaled_early) {
  float c[16] = {};
  product(t, c, 0, true);
  c[3] *= 0.5f;
  wgmma_wait<0>();
}

TK_BODY(operand_in_registers_reused) {
  float c[16] = {};
  uint32_t a[4] = {};
  wgmma_fence();
  wgmma<Major::kK>(c, a, descriptor(t, 0), Half{}, true);
  wgmma_commit();
  a[2] = 7;
  wgmma_wait<0>();
}

TK_BODY(operand_in_shared_reused) {
  float c[16] = {};
  __syncthreads();
  product(t, c, 0, true);
  t.shared[t.index] = 7;
  wgmma_wait<0>();
}

TK_BODY(register_operand_without_fence) {
  float c[16] = {};
  uint32_t a[4] = {};
  product(t, c, 0, true);
  wgmma_wait<0>();
  a[0] = 1;
  wgmma<Major::kK>(c, a, descriptor(t, 0), Half{}, true);
}

}  // namespace
