// Invalid kernels, which hang, fault or compute garbage on a GPU.
#include <csignal>

#include "cases.h"
#include "cuda/platform/sm80_ptx.h"

using namespace tk::cuda;

namespace {

constexpr unsigned kAll = 0xffffffffu;

struct Params {
  float* out = nullptr;
  int* flag = nullptr;
  int zero = 0;
};

using Body = void (*)(const Params&, unsigned char* shared, int lane, int warp);

template <Body kBody>
TK_KERNEL(128, 1)
kernel(const __grid_constant__ Params p) {
  TK_SHARED_MEMORY(shared);
  kBody(p, shared, static_cast<int>(threadIdx.x % 32), static_cast<int>(threadIdx.x / 32));
}

template <Body kBody>
void launch() {
  alignas(16) float out[256] = {};
  int flag = 0;
  TK_LAUNCH(kernel<kBody>, dim3(2), 128, 2048, nullptr, Params{out, &flag});
}

TK_DEVICE void correct(const Params& p, unsigned char*, int lane, int) {
  if (lane == 0) atomicAdd(p.out, 1.f);
}

TK_DEVICE void divergent_syncwarp(const Params& p, unsigned char*, int lane, int) {
  if (lane < 16) __syncwarp();
  p.out[lane] = __shfl_xor_sync(kAll, p.out[lane], 1);
}

TK_DEVICE void syncwarp_after_exit(const Params&, unsigned char*, int lane, int) {
  if (lane == 7) return;
  __syncwarp();
}

TK_DEVICE void syncwarp_after_half_exited(const Params&, unsigned char*, int lane, int) {
  if (lane < 16) return;
  __syncwarp();
}

TK_DEVICE void missing_lane(const Params& p, unsigned char*, int lane, int) {
  if (lane != 31) p.out[lane] = __shfl_xor_sync(kAll, p.out[lane], 1);
  __syncthreads();
}

TK_DEVICE void lane_outside_mask(const Params& p, unsigned char*, int lane, int) {
  if (lane < 16) p.out[lane] = __shfl_sync(0xffffu, p.out[lane], lane + 1);
}

TK_DEVICE void mask_without_own_lane(const Params&, unsigned char*, int, int) {
  __syncwarp(0xffffu);
}

TK_DEVICE void mma_by_part_of_a_warp(const Params&, unsigned char*, int lane, int) {
  const uint32_t a[4] = {};
  float c[4] = {};
  if (lane != 5) multiply_accumulate(c, a, 0, 0, Half{});
}

TK_DEVICE void shuffle_at_two_sites(const Params& p, unsigned char*, int lane, int) {
  float x = p.out[lane];
  if (lane < 16) {
    x = __shfl_xor_sync(kAll, x, 1);
  } else {
    x = __shfl_xor_sync(kAll, x, 2);
  }
  p.out[lane] = x;
}

TK_DEVICE void barrier_missing_a_warp(const Params&, unsigned char*, int, int warp) {
  if (warp != 3) __syncthreads();
}

TK_DEVICE void barrier_and_syncwarp(const Params&, unsigned char*, int lane, int warp) {
  if (warp == 1 && lane == 4) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

TK_DEVICE void store_past_end(const Params& p, unsigned char* shared, int lane, int) {
  shared[2048 + lane + p.zero] = 1;
}

TK_DEVICE void store_before_begin(const Params& p, unsigned char* shared, int lane, int) {
  shared[-1 - lane - p.zero] = 1;
}

TK_DEVICE void read_far_past_end(const Params& p, unsigned char* shared, int lane, int) {
  p.out[lane] = shared[8192 + lane + p.zero];
}

TK_DEVICE void copy_past_end(const Params& p, unsigned char* shared, int lane, int) {
  copy_async_16(shared + 2048 - 8 * 16 + lane / 2 * 16, p.out, true);
}

TK_DEVICE void copy_misaligned(const Params& p, unsigned char* shared, int lane, int) {
  copy_async_16(shared + lane * 8, p.out, true);
}

TK_DEVICE void copy_from_misaligned(const Params& p, unsigned char* shared, int lane, int) {
  copy_async_16(shared + lane * 16, p.out + 2, true);
}

TK_DEVICE void copy_not_to_shared(const Params& p, unsigned char*, int lane, int) {
  copy_async_16(p.out + lane * 4, p.out, true);
}

TK_DEVICE void copy_source_changed(const Params& p, unsigned char* shared, int lane, int) {
  copy_async_16(shared + lane * 16, p.out + lane * 4, true);
  commit_copies();
  p.out[lane * 4] += 1;
  wait_copies<0>();
}

TK_DEVICE void load_misaligned(const Params&, unsigned char* shared, int lane, int) {
  uint32_t x[4];
  load_matrices(x, shared + lane * 16 + 4);
}

TK_DEVICE void load_past_end(const Params&, unsigned char* shared, int lane, int) {
  uint32_t x[4];
  load_matrices_transposed(x, shared + 2048 - 16 * 31 + lane * 16);
}

TK_DEVICE void semaphore_never_released(const Params& p, unsigned char*, int, int) {
  while (load_acquire(p.flag) != 7) {
  }
}

TK_DEVICE void endless_loop(const Params& p, unsigned char*, int, int) {
  while (*static_cast<volatile int*>(p.flag) == 0) {
  }
}

TK_DEVICE void null_pointer(const Params& p, unsigned char*, int lane, int) {
  *reinterpret_cast<volatile float*>(static_cast<size_t>(p.zero)) = static_cast<float>(lane);
}

TK_DEVICE void large_locals(const Params& p, unsigned char*, int lane, int) {
  volatile float locals[40 * 1024];
  locals[lane] = 1;
  p.out[lane] = locals[lane];
}

TK_DEVICE void division_by_zero(const Params& p, unsigned char*, int lane, int) {
  p.out[lane] = static_cast<float>(lane % p.zero);
}

TK_DEVICE void misaligned_atomic(const Params& p, unsigned char*, int, int) {
  atomicAdd(reinterpret_cast<float*>(reinterpret_cast<char*>(p.out) + 2), 1.f);
}

void partial_warp() { TK_LAUNCH(kernel<correct>, dim3(1), 100, 0, nullptr, Params{}); }

void empty_grid() { TK_LAUNCH(kernel<correct>, dim3(1, 0), 128, 0, nullptr, Params{}); }

void too_much_shared_memory() {
  TK_LAUNCH(kernel<correct>, dim3(1), 128, 228 * 1024, nullptr, Params{});
}

void endless_loop_with_short_timeout() {
  tk::emulator::settings().timeout_seconds = 1;
  launch<endless_loop>();
}

// A launch after an error starts from a clean state, and the signal handlers are restored.
void correct_after_errors() {
  for (void (*broken)() : {launch<missing_lane>, launch<null_pointer>, launch<large_locals>,
                           launch<shuffle_at_two_sites>}) {
    try {
      broken();
      expect(false, "no error");
    } catch (const tk::emulator::Error&) {
    }
    float out = 0;
    TK_LAUNCH(kernel<correct>, dim3(3), 128, 2048, nullptr, Params{&out});
    expect_equal(out, 12, "warps");
  }
  struct sigaction action;
  sigaction(SIGSEGV, nullptr, &action);
  expect(action.sa_handler == SIG_DFL, "the signal handler");
}

}  // namespace

#define TK_CASE(body) {#body, launch<body>}

int main(int count, char** arguments) {
  return run_cases(count, arguments,
                   {TK_CASE(correct),
                    TK_CASE(divergent_syncwarp),
                    TK_CASE(syncwarp_after_exit),
                    TK_CASE(syncwarp_after_half_exited),
                    TK_CASE(missing_lane),
                    TK_CASE(lane_outside_mask),
                    TK_CASE(mask_without_own_lane),
                    TK_CASE(mma_by_part_of_a_warp),
                    TK_CASE(shuffle_at_two_sites),
                    TK_CASE(barrier_missing_a_warp),
                    TK_CASE(barrier_and_syncwarp),
                    TK_CASE(store_past_end),
                    TK_CASE(store_before_begin),
                    TK_CASE(read_far_past_end),
                    TK_CASE(copy_past_end),
                    TK_CASE(copy_misaligned),
                    TK_CASE(copy_from_misaligned),
                    TK_CASE(copy_not_to_shared),
                    TK_CASE(copy_source_changed),
                    TK_CASE(load_misaligned),
                    TK_CASE(load_past_end),
                    TK_CASE(semaphore_never_released),
                    TK_CASE(null_pointer),
                    TK_CASE(large_locals),
                    TK_CASE(division_by_zero),
                    TK_CASE(misaligned_atomic),
                    {"endless_loop", endless_loop_with_short_timeout},
                    {"partial_warp", partial_warp},
                    {"empty_grid", empty_grid},
                    {"too_much_shared_memory", too_much_shared_memory},
                    {"correct_after_errors", correct_after_errors}});
}
