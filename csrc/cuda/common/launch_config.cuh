// Grid sizes and dropout arguments, shared by all launches.
#pragma once

#include <climits>
#include <stdexcept>

#include "cuda/common/dropout.cuh"

namespace tk::cuda {

inline int64_t ceil_of(int64_t x, int64_t y) { return (x + y - 1) / y; }

inline unsigned grid(int64_t programs) {
  if (programs > INT_MAX)
    throw std::runtime_error("the launch needs more than 2^31 - 1 CTAs, the limit of a CUDA grid");
  return static_cast<unsigned>(programs);
}

inline int64_t sequences(const Problem& p, const LaunchArgs& launch) {
  return launch.varlen.cu_seqlens_q ? launch.varlen.B : p.B;
}

inline Dropout dropout_of(const Problem& p, const LaunchArgs& launch) {
  if (!launch.seed) return {nullptr, 0, 1.0f, 0, 0, 0};
  const double rate = p.score.dropout_p;
  return {launch.seed,
          keep_threshold(rate),
          static_cast<float>(keep_factor(rate)),
          static_cast<uint32_t>(p.dropout.first_row),
          static_cast<uint32_t>(p.dropout.first_column),
          static_cast<uint32_t>(p.dropout.first_head)};
}

}  // namespace tk::cuda
