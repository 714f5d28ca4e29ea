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

struct Block {
  unsigned char* shared;
  uint64_t* barrier;  // expects one arrival
  int t;
};

using Body = void (*)(const Params&, const Block&);

template <Body kBody>
TK_KERNEL(128, 1)
kernel(const __grid_constant__ Params p) {
  TK_SHARED_MEMORY(raw);
  unsigned char* shared = raw + (-shared_address(raw) & 1023);
  const Block block{shared, reinterpret_cast<uint64_t*>(shared + kBytes),
                    static_cast<int>(threadIdx.x)};
  if (threadIdx.x == 0) {
    mbarrier_init(block.barrier, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  kBody(p, block);
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

TK_DEVICE void load(const Params& p, const Block& block, int byte) {
  mbarrier_arrive_expect(block.barrier, 1024);
  load_tensor(block.shared + byte, p.map, block.barrier, {0, 0});
}

TK_DEVICE void store(const Params& p, const Block& block) {
  for (int n = 0; n < 256; ++n) reinterpret_cast<float*>(block.shared)[n] = 1;
  fence_async();
  store_tensor(p.map, block.shared, {0, 8 * static_cast<int>(blockIdx.x)});
  commit_stores();
}

TK_DEVICE void correct(const Params& p, const Block& block) {
  if (block.t == 0) load(p, block, 0);
  mbarrier_wait(block.barrier, 0);
  __syncthreads();
  if (block.t == 0) {
    store(p, block);
    wait_stores_read<0>();
  }
}

TK_DEVICE void no_mbarrier(const Params&, const Block& block) {
  if (block.t == 5) mbarrier_arrive(block.barrier - 1);
}

TK_DEVICE void second_init(const Params&, const Block& block) {
  if (block.t == 5) mbarrier_init(block.barrier, 1);
}

TK_DEVICE void overwritten_mbarrier(const Params&, const Block& block) {
  if (block.t == 5) {
    *block.barrier = 0;
    mbarrier_arrive(block.barrier);
  }
}

TK_DEVICE void second_arrival(const Params&, const Block& block) {
  if (block.t < 2) mbarrier_arrive_expect(block.barrier, 16);
}

TK_DEVICE void misaligned_box(const Params& p, const Block& block) {
  if (block.t == 0) load(p, block, 64);
}

TK_DEVICE void box_past_end(const Params& p, const Block& block) {
  if (block.t == 0) load(p, block, kBytes);
}

TK_DEVICE void wrong_rank(const Params& p, const Block& block) {
  if (block.t == 0) load_tensor(block.shared, p.map, block.barrier, {0, 0, 0});
}

TK_DEVICE void column_of_8_bytes(const Params& p, const Block& block) {
  if (block.t == 0) load_tensor(block.shared, p.map, block.barrier, {2, 0});
}

TK_DEVICE void store_of_ragged_rows(const Params& p, const Block& block) {
  if (block.t == 0) store_tensor(p.ragged, block.shared, {0, 0});
}

TK_DEVICE void store_before_the_first_row(const Params& p, const Block& block) {
  if (block.t == 0) store_tensor(p.map, block.shared, {0, -8});
}

TK_DEVICE void invalid_tensor_map(const Params& p, const Block& block) {
  TensorMap map = p.map;
  map.words[15] = 0;
  if (block.t == 0) load_tensor(block.shared, map, block.barrier, {0, 0});
}

TK_DEVICE void bulk_of_12_bytes(const Params& p, const Block& block) {
  if (block.t == 0) load_bulk(block.shared, p.data, 12, block.barrier);
}

TK_DEVICE void exit_before_load_arrives(const Params& p, const Block& block) {
  if (block.t == 0) load(p, block, 0);
}

// The destination of a load is undefined from its issue on.
TK_DEVICE void read_before_load(const Params& p, const Block& block) {
  float* const numbers = reinterpret_cast<float*>(block.shared);
  if (block.t != 0) return;
  numbers[7] = 1;
  fence_async();
  load(p, block, 0);
  p.data[2047] = numbers[7];
  mbarrier_wait(block.barrier, 0);
}

TK_DEVICE void store_source_changed(const Params& p, const Block& block) {
  if (block.t == 0) {
    store(p, block);
    block.shared[77] += 1;
    wait_stores_read<0>();
  }
}

TK_DEVICE void store_without_commit(const Params& p, const Block& block) {
  if (block.t == 0) {
    store_tensor(p.map, block.shared, {0, 0});
    wait_stores_read<0>();
  }
}

TK_DEVICE void barrier_of_40_threads(const Params&, const Block&) { named_barrier_sync(1, 40); }

TK_DEVICE void barrier_16(const Params&, const Block&) { named_barrier_sync(16, 128); }

TK_DEVICE void barrier_with_two_counts(const Params&, const Block& block) {
  named_barrier_sync(1, block.t < 64 ? 128 : 96);
}

TK_DEVICE void request_fewer_registers(const Params&, const Block&) { request_registers<40>(); }

TK_DEVICE void release_to_more_registers(const Params&, const Block&) {
  release_registers<40>();
  release_registers<48>();
}

TK_DEVICE uint64_t descriptor(const Block& block, int byte) {
  return matrix_descriptor(block.shared + byte, 16, 1024, Swizzle::k128);
}

TK_DEVICE void product(const Block& block, float (&c)[16], int byte, bool accumulate) {
  wgmma_fence();
  wgmma<Major::kK, Major::kK>(c, descriptor(block, 0), descriptor(block, byte), Half{}, accumulate);
  wgmma_commit();
}

TK_DEVICE void wgmma_by_one_warp(const Params&, const Block& block) {
  float c[16];
  if (block.t >= 32) return;
  product(block, c, 0, false);
  wgmma_wait<0>();
}

TK_DEVICE void wgmma_with_divergent_operands(const Params&, const Block& block) {
  float c[16];
  product(block, c, block.t % 32 == 9 ? 4096 : 0, false);
  wgmma_wait<0>();
}

TK_DEVICE void wgmma_with_divergent_scale(const Params&, const Block& block) {
  float c[16] = {};
  product(block, c, 0, block.t < 96);
  wgmma_wait<0>();
}

TK_DEVICE void wgmma_past_end(const Params&, const Block& block) {
  float c[16];
  product(block, c, kBytes - 1024, false);
  wgmma_wait<0>();
}

TK_DEVICE void wgmma_inside_swizzle_pattern(const Params&, const Block& block) {
  float c[16];
  product(block, c, 128, false);
  wgmma_wait<0>();
}

// Accumulator registers must not be touched before the wait.
TK_DEVICE void accumulator_scaled_early(const Params&, const Block& block) {
  float c[16] = {};
  product(block, c, 0, true);
  c[3] *= 0.5f;
  wgmma_wait<0>();
}

TK_DEVICE void operand_in_registers_reused(const Params&, const Block& block) {
  float c[16] = {};
  uint32_t a[4] = {};
  wgmma_fence();
  wgmma<Major::kK>(c, a, descriptor(block, 0), Half{}, true);
  wgmma_commit();
  a[2] = 7;
  wgmma_wait<0>();
}

TK_DEVICE void operand_in_shared_reused(const Params&, const Block& block) {
  float c[16] = {};
  __syncthreads();
  product(block, c, 0, true);
  block.shared[block.t] = 7;
  wgmma_wait<0>();
}

TK_DEVICE void register_operand_without_fence(const Params&, const Block& block) {
  float c[16] = {};
  uint32_t a[4] = {};
  product(block, c, 0, true);
  wgmma_wait<0>();
  a[0] = 1;
  wgmma<Major::kK>(c, a, descriptor(block, 0), Half{}, true);
}

}  // namespace

#define TK_CASE(body) {#body, launch<body>}

int main(int count, char** arguments) {
  return run_cases(count, arguments,
                   {TK_CASE(correct),
                    TK_CASE(no_mbarrier),
                    TK_CASE(second_init),
                    TK_CASE(overwritten_mbarrier),
                    TK_CASE(second_arrival),
                    TK_CASE(misaligned_box),
                    TK_CASE(box_past_end),
                    TK_CASE(wrong_rank),
                    TK_CASE(column_of_8_bytes),
                    TK_CASE(store_of_ragged_rows),
                    TK_CASE(store_before_the_first_row),
                    TK_CASE(invalid_tensor_map),
                    TK_CASE(bulk_of_12_bytes),
                    TK_CASE(exit_before_load_arrives),
                    TK_CASE(read_before_load),
                    TK_CASE(store_source_changed),
                    TK_CASE(store_without_commit),
                    TK_CASE(barrier_of_40_threads),
                    TK_CASE(barrier_16),
                    TK_CASE(barrier_with_two_counts),
                    TK_CASE(request_fewer_registers),
                    TK_CASE(release_to_more_registers),
                    TK_CASE(wgmma_by_one_warp),
                    TK_CASE(wgmma_with_divergent_operands),
                    TK_CASE(wgmma_with_divergent_scale),
                    TK_CASE(wgmma_past_end),
                    TK_CASE(wgmma_inside_swizzle_pattern),
                    TK_CASE(accumulator_scaled_early),
                    TK_CASE(operand_in_registers_reused),
                    TK_CASE(operand_in_shared_reused),
                    TK_CASE(register_operand_without_fence)});
}
