// What the launches have in common.
#pragma once

#include <climits>
#include <stdexcept>

#include "cuda/common/dropout.cuh"

namespace tk::cuda {

inline int64_t ceil_of(int64_t x, int64_t y) { return (x + y - 1) / y; }

inline unsigned grid(int64_t programs) {
  if (programs > INT_MAX) throw std::runtime_error("more blocks than a grid of CUDA takes");
  return static_cast<unsigned>(programs);
}

inline int64_t sequences(const Problem& p, const Call& call) {
  return call.varlen.cu_seqlens_q ? call.varlen.B : p.B;
}

inline Dropout dropout_of(const Problem& p, const Call& call) {
  if (!call.seed) return {nullptr, 0, 1.0f};
  const double rate = p.dropout.p;
  return {call.seed, keep_threshold(rate), rate < 1 ? static_cast<float>(1 / (1 - rate)) : 0.0f};
}

}  // namespace tk::cuda
