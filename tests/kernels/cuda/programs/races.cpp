// Kernels with data races, whose results may still be right, and their correct versions.
#include "cases.h"

using namespace tk::cuda;

namespace {

constexpr unsigned kAll = 0xffffffffu;

struct Params {
  float* x;
  float* y;
  int* flag;
};

using Body = void (*)(const Params&, float* shared, int t);

template <Body kBody>
TK_KERNEL(64, 1)
kernel(const __grid_constant__ Params p) {
  TK_SHARED_MEMORY(shared);
  kBody(p, reinterpret_cast<float*>(shared), static_cast<int>(threadIdx.x));
}

template <Body kBody, unsigned kBlocks = 1>
void launch() {
  alignas(16) float x[64] = {}, y[256] = {};
  int flag = 0;
  TK_LAUNCH(kernel<kBody>, dim3(kBlocks), 64, 1024, nullptr, Params{x, y, &flag});
}

enum class Order { kNone, kWarp, kBlock };

// Adjacent lanes exchange a number through shared memory.
template <Order kOrder>
void exchange(const Params& p, float* shared, int t) {
  shared[t] = p.x[t];
  float x = __shfl_xor_sync(kAll, p.x[t], 1);  // waits, but does not order memory
  if (kOrder == Order::kWarp) __syncwarp();
  if (kOrder == Order::kBlock) __syncthreads();
  p.y[t] = shared[t ^ 1] + x;
}

// The same between lanes of different warps.
template <Order kOrder>
void exchange_far(const Params& p, float* shared, int t) {
  shared[t] = p.x[t];
  if (kOrder == Order::kWarp) __syncwarp();
  if (kOrder == Order::kBlock) __syncthreads();
  p.y[t] = shared[t ^ 32];
}

template <bool kTransposed, Order kOrder>
void load_matrix(const Params& p, float* shared, int t) {
  for (int n = 0; n < 4; ++n) shared[t * 4 + n] = p.x[t];
  if (kOrder == Order::kWarp) __syncwarp();
  uint32_t x[4];
  if (kTransposed) {
    load_matrices_transposed(x, shared + t * 4);
  } else {
    load_matrices(x, shared + t * 4);
  }
  p.y[t] = static_cast<float>(x[0]);
}

// A copy overwrites memory that the other warp may still read.
template <Order kOrder>
void copy_over(const Params& p, float* shared, int t) {
  shared[t] = p.x[t];
  __syncthreads();
  p.y[t] = shared[t ^ 32];
  if (kOrder == Order::kBlock) __syncthreads();
  if (t < 16) copy_async_16(shared + t * 4, p.x, true);
  commit_copies();
  wait_copies<0>();
}

template <Order kOrder>
void through_global(const Params& p, float*, int t) {
  p.y[t] = static_cast<float>(t);
  if (kOrder == Order::kBlock) __syncthreads();
  p.x[t] = p.y[63 - t];
}

void atomics(const Params& p, float* shared, int t) {
  if (t == 0) shared[0] = 0;
  __syncthreads();
  atomicAdd(shared, 1.f);
  atomicAdd(p.y, 1.f);
}

void atomic_and_plain(const Params& p, float*, int t) {
  if (t == 40) {
    p.y[0] = 1;
  } else {
    atomicAdd(p.y, 1.f);
  }
}

// Blocks add in order of a semaphore.
template <bool kWait, bool kRelease>
void semaphore(const Params& p, float*, int t) {
  if (t == 0 && kWait) {
    while (load_acquire(p.flag) != static_cast<int>(blockIdx.x)) {
    }
  }
  __syncthreads();
  p.y[t] += p.x[t];
  __syncthreads();
  if (t != 0) return;
  if (kRelease) {
    add_release(p.flag, 1);
  } else {
    atomicAdd(p.flag, 1);
  }
}

// The last block to finish adds up the results of all blocks.
template <bool kFence>
void last_block(const Params& p, float* shared, int t) {
  p.y[blockIdx.x * 64 + static_cast<unsigned>(t)] = p.x[t];
  __syncthreads();
  if (t == 0) {
    if (kFence) __threadfence();
    shared[0] = static_cast<float>(atomicAdd(p.flag, 1));
    if (kFence) __threadfence();
  }
  __syncthreads();
  if (shared[0] != static_cast<float>(gridDim.x - 1)) return;
  for (unsigned block = 0; block < gridDim.x; ++block)
    p.x[t] += p.y[block * 64 + static_cast<unsigned>(t)];
}

// The same with atomics: without a race, but the rounding of the sums depends on the order.
template <bool kWait>
void sums(const Params& p, float*, int t) {
  if (t == 0 && kWait) {
    while (load_acquire(p.flag) != static_cast<int>(blockIdx.x)) {
    }
  }
  __syncthreads();
  add_to(p.y + t, p.x[t]);
  __syncthreads();
  if (t == 0) add_release(p.flag, 1);
}

template <Body kBody>
void launch_with_ordered_sums() {
  tk::emulator::settings().ordered_sums = true;
  launch<kBody, 4>();
}

constexpr float kTable[] = {3, 1, 4, 1, 5, 9, 2, 6};

template <int kFrom>
void read_outside(const Params& p, float*, int t) {
  p.y[t] = p.x[t + kFrom] + kTable[p.flag[0] + t % 8];
}

void write_outside(const Params& p, float*, int t) { p.y[t - 1] = p.x[t]; }

template <Body kBody>
void launch_with_extents() {
  // One allocation, so that the addresses just outside of x and y are valid.
  float numbers[64 * 5] = {};
  int flag = 0;
  const Params params{numbers + 64, numbers + 192, &flag};
  tk::emulator::settings().global = {{params.x, 256}, {params.y, 256}, {&flag, 4}};
  TK_LAUNCH(kernel<kBody>, dim3(1), 64, 1024, nullptr, params);
}

void read_past_end(const Params& p, float* shared, int t) { p.y[t] = shared[t + 193]; }

const Registered kCases[] = {
    {"exchange", launch<exchange<Order::kNone>>},
    {"exchange_with_syncwarp", launch<exchange<Order::kWarp>>},
    {"exchange_with_syncthreads", launch<exchange<Order::kBlock>>},
    {"exchange_far", launch<exchange_far<Order::kWarp>>},
    {"exchange_far_with_syncthreads", launch<exchange_far<Order::kBlock>>},
    {"load_matrix", launch<load_matrix<false, Order::kNone>>},
    {"load_matrix_with_syncwarp", launch<load_matrix<false, Order::kWarp>>},
    {"load_matrix_transposed", launch<load_matrix<true, Order::kNone>>},
    {"load_matrix_transposed_with_syncwarp", launch<load_matrix<true, Order::kWarp>>},
    {"copy_over", launch<copy_over<Order::kNone>>},
    {"copy_over_with_syncthreads", launch<copy_over<Order::kBlock>>},
    {"through_global", launch<through_global<Order::kNone>>},
    {"through_global_with_syncthreads", launch<through_global<Order::kBlock>>},
    {"atomics", launch<atomics, 3>},
    {"atomic_and_plain", launch<atomic_and_plain>},
    {"semaphore_without_wait", launch<semaphore<false, true>, 4>},
    {"semaphore_without_release", launch<semaphore<true, false>, 4>},
    {"semaphore", launch<semaphore<true, true>, 4>},
    {"last_block", launch<last_block<false>, 4>},
    {"last_block_with_fences", launch<last_block<true>, 4>},
    {"sums", launch_with_ordered_sums<sums<false>>},
    {"sums_in_order", launch_with_ordered_sums<sums<true>>},
    {"sums_with_any_order_allowed", launch<sums<false>, 4>},
    {"read_outside", launch_with_extents<read_outside<1>>},
    {"write_outside", launch_with_extents<write_outside>},
    {"read_inside", launch_with_extents<read_outside<0>>},
    {"read_past_end", launch<read_past_end>}};

}  // namespace
