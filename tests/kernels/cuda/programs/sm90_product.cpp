// c = a b^T with one producer and two consumer warpgroups, and variants with one defect each.
#include "cases.h"
#include "cuda/platform/sm90_wgmma.h"

using namespace tk::cuda;

namespace {

constexpr int kRows = 128, kColumns = 64;  // of c
constexpr int kDepth = 64;                 // k extent of a stage, in elements: rows of 128 bytes
constexpr int kStages = 2;
constexpr int kA = kRows * kDepth * 2, kB = kColumns * kDepth * 2, kStage = kA + kB;
constexpr int kC = 64 * kColumns * 4;  // of each warpgroup
constexpr int kBarriersAt = kStages * kStage + 2 * kC;
constexpr int kSharedBytes = 1024 + kBarriersAt + 2 * kStages * 8;

struct Params {
  TensorMap a, b;  // (128, K), (64, K)
  TensorMap c;     // (128, 64)
  int steps;
};

struct Pipeline {
  unsigned char* stages;
  uint64_t* full;
  uint64_t* empty;
};

TK_DEVICE void produce(const Params& p, const Pipeline& pipeline) {
  for (int step = 0; step < p.steps; ++step) {
    const int stage = step % kStages;
    const auto round = static_cast<uint32_t>(step / kStages);
    const uint32_t parity = has_defect("empty_parity") ? round & 1 : (round & 1) ^ 1;
    if (!has_defect("no_empty_wait")) mbarrier_wait(pipeline.empty + stage, parity);
    const int bytes = has_defect("expects_less")   ? kStage - 1024
                      : has_defect("expects_more") ? kStage + 1024
                                                   : kStage;
    mbarrier_arrive_expect(pipeline.full + stage, static_cast<uint32_t>(bytes));
    unsigned char* const at = pipeline.stages + stage * kStage;
    load_tensor(at, p.a, pipeline.full + stage, {step * kDepth, 0});
    load_tensor(at + kA, p.b, pipeline.full + stage, {step * kDepth, 0});
  }
}

TK_DEVICE void multiply(const unsigned char* at, int group, float (&c)[32], bool first) {
  const Swizzle swizzle = has_defect("other_swizzle") ? Swizzle::k64 : Swizzle::k128;
  const uint32_t stride = has_defect("other_stride") ? 512 : 1024;
  const int k_bytes = has_defect("other_step") ? 16 : 32;
  for (int k = 0; k < kDepth / 16; ++k) {
    const unsigned char* a = at + group * (kA / 2) + k * k_bytes;
    const unsigned char* b = at + kA + k * k_bytes;
    if (has_defect("other_descriptor_in_one_warp") && threadIdx.x / 32 % 4 == 2) b = at + kA;
    wgmma<Major::kK, Major::kK>(c, matrix_descriptor(a, 16, stride, swizzle),
                                matrix_descriptor(b, 16, stride, swizzle), Half{}, !first || k > 0);
  }
}

TK_DEVICE void store(const Params& p, unsigned char* shared, int group, const float (&c)[32]) {
  const int t = static_cast<int>(threadIdx.x % 128), lane = t % 32, warp = t / 32;
  float* rows = reinterpret_cast<float*>(shared);
  for (int i = 0; i < 32; ++i) {
    const int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    rows[row * kColumns + column] = c[i];
  }
  if (!has_defect("no_store_fence") && !(has_defect("store_fence_in_one_warp") && warp != 0)) {
    fence_async();
  }
  if (!has_defect("no_store_barrier")) {
    named_barrier_sync(1 + group, has_defect("store_barrier_count") ? 256 : 128);
  }
  if (t == 0) {
    store_tensor(p.c, shared, {0, group * 64});
    commit_stores();
    if (!has_defect("no_store_wait")) wait_stores_read<0>();
  }
}

TK_DEVICE void consume(const Params& p, const Pipeline& pipeline, unsigned char* shared,
                       int group) {
  float c[32];
  wgmma_hold(c);
  for (int step = 0; step < p.steps; ++step) {
    const int stage = step % kStages;
    const auto round = static_cast<uint32_t>(step / kStages);
    const uint32_t parity = has_defect("full_parity") ? (round & 1) ^ 1 : round & 1;
    if (!has_defect("no_full_wait")) mbarrier_wait(pipeline.full + stage, parity);
    if (!has_defect("no_wgmma_fence")) wgmma_fence();
    multiply(pipeline.stages + stage * kStage, group, c, step == 0);
    if (!has_defect("no_wgmma_commit")) wgmma_commit();
    const bool signals = threadIdx.x % 128 == 0;
    if (has_defect("released_early") && signals) mbarrier_arrive(pipeline.empty + stage);
    if (has_defect("registers_in_flight") && step == 1) c[0] += 1;
    if (has_defect("wgmma_wait_for_one_less")) {
      wgmma_wait<1>();
    } else if (!has_defect("no_wgmma_wait")) {
      wgmma_wait<0>();
    }
    wgmma_hold(c);
    // One thread releases the stage: its wait covers the products of all four warps.
    if (!has_defect("released_early") && signals) mbarrier_arrive(pipeline.empty + stage);
  }
  store(p, shared + kStages * kStage + group * kC, group, c);
}

TK_KERNEL(384, 1) product_kernel(const __grid_constant__ Params p) {
  TK_SHARED_MEMORY(raw);
  unsigned char* shared = align_to(raw, 1024);
  if (has_defect("not_aligned")) shared = raw + 128 * (shared_address(raw) % 1024 == 0);
  auto* barriers = reinterpret_cast<uint64_t*>(shared + kBarriersAt);
  const Pipeline pipeline{shared, barriers, barriers + kStages};
  const int group = static_cast<int>(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    const uint32_t consumers = has_defect("too_few_arrivals")    ? 3
                               : has_defect("too_many_arrivals") ? 1
                                                                 : 2;
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(pipeline.full + stage, 1);
      mbarrier_init(pipeline.empty + stage, consumers);
    }
    if (!has_defect("no_init_fence")) fence_mbarrier_init();
  }
  if (!has_defect("no_init_sync")) __syncthreads();
  if (group == 0) {
    if (!has_defect("registers_of_one_warp") || threadIdx.x < 32) release_registers<40>();
    if (threadIdx.x == 0) produce(p, pipeline);
  } else {
    if (has_defect("too_many_registers")) {
      request_registers<248>();
    } else if (!has_defect("registers_of_one_warp")) {
      request_registers<232>();
    }
    consume(p, pipeline, shared, group - 1);
  }
}

TK_CASE(product) {
  constexpr int K = 5 * kDepth;
  Numbers numbers;
  Array<Half> a(kRows * K), b(kColumns * K);
  fill(a, numbers);
  fill(b, numbers);
  Array<float> c(kRows * kColumns, NAN);
  const auto halves = [](Array<Half>& x, uint32_t rows) {
    return encode({x.on_device(),
                   TensorType::kHalf,
                   2,
                   {K, rows},
                   {2, 2 * K},
                   {kDepth, rows},
                   Swizzle::k128});
  };
  const TensorMap c_map = encode({c.on_device(),
                                  TensorType::kFloat,
                                  2,
                                  {kColumns, kRows},
                                  {4, 4 * kColumns},
                                  {kColumns, 64},
                                  Swizzle::kNone});
  const Params params{halves(a, kRows), halves(b, kColumns), c_map, K / kDepth};
  const int missing = has_defect("shared_too_small") ? 1024 : 0;
  TK_LAUNCH(product_kernel, dim3(1), 384, kSharedBytes - missing, nullptr, params);
  finish();
  for (size_t row = 0; row < kRows; ++row) {
    for (size_t column = 0; column < kColumns; ++column) {
      const double sum = dot(&a[row * K], &b[column * K], K);
      expect_near(c[row * kColumns + column], sum, 1e-3, "c");
    }
  }
}

}  // namespace
