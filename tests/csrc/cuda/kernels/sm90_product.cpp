// c = a b^T by a warpgroup that loads and two that multiply, and the ways in which it can be
// broken.
#include "cases.h"
#include "cuda/platform/sm90_wgmma.h"

using namespace tk::cuda;

namespace {

enum class Broken {
  kNothing,
  kNoFullWait,
  kNoEmptyWait,
  kFullParity,
  kEmptyParity,
  kExpectsLess,
  kExpectsMore,
  kTooFewArrivals,
  kTooManyArrivals,
  kNoInitFence,
  kNoInitSync,
  kNoWgmmaWait,
  kWgmmaWaitForOneLess,
  kNoWgmmaFence,
  kNoWgmmaCommit,
  kReleasedEarly,
  kRegistersInFlight,
  kOtherSwizzle,
  kOtherStride,
  kOtherStep,
  kOtherDescriptorInOneWarp,
  kNotAligned,
  kNoStoreFence,
  kStoreFenceInOneWarp,
  kNoStoreBarrier,
  kStoreBarrierCount,
  kNoStoreWait,
  kRegistersOfOneWarp,
  kTooManyRegisters,
  kSharedTooSmall,
};

constexpr int kRows = 128, kColumns = 64;  // of c
constexpr int kDepth = 64;                 // of a stage, in elements: rows of 128 bytes
constexpr int kStages = 2;
constexpr int kA = kRows * kDepth * 2, kB = kColumns * kDepth * 2, kStage = kA + kB;
constexpr int kC = 64 * kColumns * 4;  // of a warpgroup
constexpr int kBarriersAt = kStages * kStage + 2 * kC;
constexpr int kSharedBytes = 1024 + kBarriersAt + 2 * kStages * 8;

struct Params {
  TensorMap a, b;  // (128, K), (64, K)
  TensorMap c;     // (128, 64)
  int steps;
  Broken broken;
};

// Only in the emulator: the kernel that nvcc compiles is whole.
TK_DEVICE bool is_broken([[maybe_unused]] const Params& p, [[maybe_unused]] Broken how) {
#ifdef TK_EMULATOR
  return p.broken == how;
#else
  return false;
#endif
}

struct Ring {
  unsigned char* stages;
  uint64_t* full;
  uint64_t* empty;
};

TK_DEVICE void produce(const Params& p, const Ring& ring) {
  for (int step = 0; step < p.steps; ++step) {
    const int stage = step % kStages;
    const auto round = static_cast<uint32_t>(step / kStages);
    const uint32_t parity = is_broken(p, Broken::kEmptyParity) ? round & 1 : (round & 1) ^ 1;
    if (!is_broken(p, Broken::kNoEmptyWait)) mbarrier_wait(ring.empty + stage, parity);
    const int bytes = is_broken(p, Broken::kExpectsLess)   ? kStage - 1024
                      : is_broken(p, Broken::kExpectsMore) ? kStage + 1024
                                                           : kStage;
    mbarrier_arrive_expect(ring.full + stage, static_cast<uint32_t>(bytes));
    unsigned char* const at = ring.stages + stage * kStage;
    load_tensor(at, p.a, ring.full + stage, {step * kDepth, 0});
    load_tensor(at + kA, p.b, ring.full + stage, {step * kDepth, 0});
  }
}

TK_DEVICE void multiply(const Params& p, const unsigned char* at, int group, float (&c)[32],
                        bool first) {
  const Swizzle swizzle = is_broken(p, Broken::kOtherSwizzle) ? Swizzle::k64 : Swizzle::k128;
  const uint32_t stride = is_broken(p, Broken::kOtherStride) ? 512 : 1024;
  const int k_bytes = is_broken(p, Broken::kOtherStep) ? 16 : 32;
  for (int k = 0; k < kDepth / 16; ++k) {
    const unsigned char* a = at + group * (kA / 2) + k * k_bytes;
    const unsigned char* b = at + kA + k * k_bytes;
    if (is_broken(p, Broken::kOtherDescriptorInOneWarp) && threadIdx.x / 32 % 4 == 2) b = at + kA;
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
  if (!is_broken(p, Broken::kNoStoreFence) &&
      !(is_broken(p, Broken::kStoreFenceInOneWarp) && warp != 0)) {
    fence_async();
  }
  if (!is_broken(p, Broken::kNoStoreBarrier)) {
    named_barrier_sync(1 + group, is_broken(p, Broken::kStoreBarrierCount) ? 256 : 128);
  }
  if (t == 0) {
    store_tensor(p.c, shared, {0, group * 64});
    commit_stores();
    if (!is_broken(p, Broken::kNoStoreWait)) wait_stores_read<0>();
  }
}

TK_DEVICE void consume(const Params& p, const Ring& ring, unsigned char* shared, int group) {
  float c[32];
  wgmma_hold(c);
  for (int step = 0; step < p.steps; ++step) {
    const int stage = step % kStages;
    const auto round = static_cast<uint32_t>(step / kStages);
    const uint32_t parity = is_broken(p, Broken::kFullParity) ? (round & 1) ^ 1 : round & 1;
    if (!is_broken(p, Broken::kNoFullWait)) mbarrier_wait(ring.full + stage, parity);
    if (!is_broken(p, Broken::kNoWgmmaFence)) wgmma_fence();
    multiply(p, ring.stages + stage * kStage, group, c, step == 0);
    if (!is_broken(p, Broken::kNoWgmmaCommit)) wgmma_commit();
    const bool signals = threadIdx.x % 128 == 0;
    if (is_broken(p, Broken::kReleasedEarly) && signals) mbarrier_arrive(ring.empty + stage);
    if (is_broken(p, Broken::kRegistersInFlight) && step == 1) c[0] += 1;
    if (is_broken(p, Broken::kWgmmaWaitForOneLess)) {
      wgmma_wait<1>();
    } else if (!is_broken(p, Broken::kNoWgmmaWait)) {
      wgmma_wait<0>();
    }
    wgmma_hold(c);
    // One thread of the warpgroup: its wait is for products of all four warps.
    if (!is_broken(p, Broken::kReleasedEarly) && signals) mbarrier_arrive(ring.empty + stage);
  }
  store(p, shared + kStages * kStage + group * kC, group, c);
}

TK_KERNEL(384, 1) product_kernel(const __grid_constant__ Params p) {
  TK_SHARED_MEMORY(raw);
  unsigned char* shared = raw + (-shared_address(raw) & 1023);
  if (is_broken(p, Broken::kNotAligned)) shared = raw + 128 * (shared_address(raw) % 1024 == 0);
  auto* barriers = reinterpret_cast<uint64_t*>(shared + kBarriersAt);
  const Ring ring{shared, barriers, barriers + kStages};
  const int group = static_cast<int>(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    const uint32_t consumers = is_broken(p, Broken::kTooFewArrivals)    ? 3
                               : is_broken(p, Broken::kTooManyArrivals) ? 1
                                                                        : 2;
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(ring.full + stage, 1);
      mbarrier_init(ring.empty + stage, consumers);
    }
    if (!is_broken(p, Broken::kNoInitFence)) fence_mbarrier_init();
  }
  if (!is_broken(p, Broken::kNoInitSync)) __syncthreads();
  if (group == 0) {
    if (!is_broken(p, Broken::kRegistersOfOneWarp) || threadIdx.x < 32) release_registers<40>();
    if (threadIdx.x == 0) produce(p, ring);
  } else {
    if (is_broken(p, Broken::kTooManyRegisters)) {
      request_registers<248>();
    } else if (!is_broken(p, Broken::kRegistersOfOneWarp)) {
      request_registers<232>();
    }
    consume(p, ring, shared, group - 1);
  }
}

template <Broken kBroken>
void product() {
  constexpr int K = 5 * kDepth;
  Numbers numbers;
  Array<Half> a(kRows * K), b(kColumns * K);
  for (Half& x : a) x = rounded<Half>(numbers.next());
  for (Half& x : b) x = rounded<Half>(numbers.next());
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
  const Params params{halves(a, kRows), halves(b, kColumns), c_map, K / kDepth, kBroken};
  constexpr bool kSmall = kBroken == Broken::kSharedTooSmall;
  TK_LAUNCH(product_kernel, dim3(1), 384, kSharedBytes - (kSmall ? 1024 : 0), nullptr, params);
  finish();
  for (size_t row = 0; row < kRows; ++row) {
    for (size_t column = 0; column < kColumns; ++column) {
      double sum = 0;
      for (size_t k = 0; k < K; ++k) {
        sum += double(value_of(a[row * K + k])) * value_of(b[column * K + k]);
      }
      expect_near(c[row * kColumns + column], sum, 1e-3, "c");
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  return run_cases(count, arguments,
                   {{"right", product<Broken::kNothing>},
                    {"no_full_wait", product<Broken::kNoFullWait>},
                    {"no_empty_wait", product<Broken::kNoEmptyWait>},
                    {"full_parity", product<Broken::kFullParity>},
                    {"empty_parity", product<Broken::kEmptyParity>},
                    {"expects_less", product<Broken::kExpectsLess>},
                    {"expects_more", product<Broken::kExpectsMore>},
                    {"too_few_arrivals", product<Broken::kTooFewArrivals>},
                    {"too_many_arrivals", product<Broken::kTooManyArrivals>},
                    {"no_init_fence", product<Broken::kNoInitFence>},
                    {"no_init_sync", product<Broken::kNoInitSync>},
                    {"no_wgmma_wait", product<Broken::kNoWgmmaWait>},
                    {"wgmma_wait_for_one_less", product<Broken::kWgmmaWaitForOneLess>},
                    {"no_wgmma_fence", product<Broken::kNoWgmmaFence>},
                    {"no_wgmma_commit", product<Broken::kNoWgmmaCommit>},
                    {"released_early", product<Broken::kReleasedEarly>},
                    {"registers_in_flight", product<Broken::kRegistersInFlight>},
                    {"other_swizzle", product<Broken::kOtherSwizzle>},
                    {"other_stride", product<Broken::kOtherStride>},
                    {"other_step", product<Broken::kOtherStep>},
                    {"other_descriptor_in_one_warp", product<Broken::kOtherDescriptorInOneWarp>},
                    {"not_aligned", product<Broken::kNotAligned>},
                    {"no_store_fence", product<Broken::kNoStoreFence>},
                    {"store_fence_in_one_warp", product<Broken::kStoreFenceInOneWarp>},
                    {"no_store_barrier", product<Broken::kNoStoreBarrier>},
                    {"store_barrier_count", product<Broken::kStoreBarrierCount>},
                    {"no_store_wait", product<Broken::kNoStoreWait>},
                    {"registers_of_one_warp", product<Broken::kRegistersOfOneWarp>},
                    {"too_many_registers", product<Broken::kTooManyRegisters>},
                    {"shared_too_small", product<Broken::kSharedTooSmall>}});
}
