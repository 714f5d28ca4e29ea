// Sets device memory to zero with a kernel.
#pragma once

#include "cuda/platform/device.h"

namespace tk::cuda {

constexpr int kClearThreads = 256;

// Zeroes `count` 32-bit words.
static TK_KERNEL(kClearThreads, 1) clear_kernel(uint32_t* words, int64_t count) {
  const int64_t threads = int64_t{gridDim.x} * kClearThreads;
  for (int64_t n = int64_t{blockIdx.x} * kClearThreads + threadIdx.x; n < count; n += threads) {
    words[n] = 0;
  }
}

// `bytes` is a multiple of 4.
inline void clear(void* memory, size_t bytes, void* stream) {
  const auto words = static_cast<int64_t>(bytes / 4);
  if (words == 0) return;
  constexpr int64_t kMaxBlocks = 1024;
  const int64_t blocks = (words + kClearThreads - 1) / kClearThreads;
  TK_LAUNCH(clear_kernel, static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks),
            kClearThreads, 0, stream, static_cast<uint32_t*>(memory), words);
}

}  // namespace tk::cuda
