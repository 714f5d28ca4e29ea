// Invalid kernels, which hang, fault or compute garbage on a GPU.
#include <csignal>

#include "cases.h"

using namespace tk::cuda;

namespace {

constexpr unsigned kAll = 0xffffffffu;

struct Params {
  float* out = nullptr;
  int* flag = nullptr;
  int zero = 0;
};

struct Thread {
  unsigned char* shared;
  int lane, warp;
};

using Body = void (*)(const Params&, const Thread&);

template <Body kBody>
TK_KERNEL(128, 1)
kernel(const __grid_constant__ Params p) {
  TK_SHARED_MEMORY(shared);
  kBody(p, {shared, static_cast<int>(threadIdx.x % 32), static_cast<int>(threadIdx.x / 32)});
}

template <Body kBody>
void launch() {
  alignas(16) float out[256] = {};
  int flag = 0;
  TK_LAUNCH(kernel<kBody>, dim3(2), 128, 2048, nullptr, Params{out, &flag});
}

TK_BODY(correct) {
  if (t.lane == 0) atomicAdd(p.out, 1.f);
}

TK_BODY(divergent_syncwarp) {
  if (t.lane < 16) __syncwarp();
  p.out[t.lane] = __shfl_xor_sync(kAll, p.out[t.lane], 1);
}

TK_BODY(syncwarp_after_exit) {
  if (t.lane == 7) return;
  __syncwarp();
}

TK_BODY(syncwarp_after_half_exited) {
  if (t.lane < 16) return;
  __syncwarp();
}

TK_BODY(missing_lane) {
  if (t.lane != 31) p.out[t.lane] = __shfl_xor_sync(kAll, p.out[t.lane], 1);
  __syncthreads();
}

TK_BODY(lane_outside_mask) {
  if (t.lane < 16) p.out[t.lane] = __shfl_sync(0xffffu, p.out[t.lane], t.lane + 1);
}

TK_BODY(mask_without_own_lane) { __syncwarp(0xffffu); }

TK_BODY(mma_by_part_of_a_warp) {
  const uint32_t a[4] = {};
  float c[4] = {};
  if (t.lane != 5) multiply_accumulate(c, a, 0, 0, Half{});
}

TK_BODY(shuffle_at_two_sites) {
  float x = p.out[t.lane];
  if (t.lane < 16) {
    x = __shfl_xor_sync(kAll, x, 1);
  } else {
    x = __shfl_xor_sync(kAll, x, 2);
  }
  p.out[t.lane] = x;
}

TK_BODY(barrier_missing_a_warp) {
  if (t.warp != 3) __syncthreads();
}

TK_BODY(barrier_and_syncwarp) {
  if (t.warp == 1 && t.lane == 4) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

TK_BODY(store_past_end) { t.shared[2048 + t.lane + p.zero] = 1; }

TK_BODY(store_before_begin) { t.shared[-1 - t.lane - p.zero] = 1; }

TK_BODY(read_far_past_end) { p.out[t.lane] = t.shared[8192 + t.lane + p.zero]; }

TK_BODY(copy_past_end) { copy_async_16(t.shared + 2048 - 8 * 16 + t.lane / 2 * 16, p.out, true); }

TK_BODY(copy_misaligned) { copy_async_16(t.shared + t.lane * 8, p.out, true); }

TK_BODY(copy_from_misaligned) { copy_async_16(t.shared + t.lane * 16, p.out + 2, true); }

TK_BODY(copy_not_to_shared) { copy_async_16(p.out + t.lane * 4, p.out, true); }

TK_BODY(copy_source_changed) {
  copy_async_16(t.shared + t.lane * 16, p.out + t.lane * 4, true);
  commit_copies();
  p.out[t.lane * 4] += 1;
  wait_copies<0>();
}

TK_BODY(load_misaligned) {
  uint32_t x[4];
  load_matrices(x, t.shared + t.lane * 16 + 4);
}

TK_BODY(load_past_end) {
  uint32_t x[4];
  load_matrices_transposed(x, t.shared + 2048 - 16 * 31 + t.lane * 16);
}

TK_BODY(semaphore_never_released) {
  while (load_acquire(p.flag) != 7) {
  }
}

TK_DEVICE void endless_loop_body(const Params& p, const Thread&) {
  while (*static_cast<volatile int*>(p.flag) == 0) {
  }
}

TK_BODY(null_pointer) {
  *reinterpret_cast<volatile float*>(static_cast<size_t>(p.zero)) = static_cast<float>(t.lane);
}

TK_BODY(large_locals) {
  volatile float locals[40 * 1024];
  locals[t.lane] = 1;
  p.out[t.lane] = locals[t.lane];
}

TK_BODY(division_by_zero) { p.out[t.lane] = static_cast<float>(t.lane % p.zero); }

TK_BODY(misaligned_atomic) {
  atomicAdd(reinterpret_cast<float*>(reinterpret_cast<char*>(p.out) + 2), 1.f);
}

TK_CASE(partial_warp) { TK_LAUNCH(kernel<correct>, dim3(1), 100, 0, nullptr, Params{}); }

TK_CASE(empty_grid) { TK_LAUNCH(kernel<correct>, dim3(1, 0), 128, 0, nullptr, Params{}); }

TK_CASE(too_much_shared_memory) {
  TK_LAUNCH(kernel<correct>, dim3(1), 128, 228 * 1024, nullptr, Params{});
}

TK_CASE(endless_loop) {
  tk::emulator::settings().timeout_seconds = 1;
  launch<endless_loop_body>();
}

// A launch after an error starts from a clean state, and the signal handlers are restored.
TK_CASE(correct_after_errors) {
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
