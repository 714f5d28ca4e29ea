// Problems that the Hopper kernels support, and the tile widths they use.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "cuda/common/tile_config.h"

namespace tk::cuda::sm90 {

// True if TMA can address a 16-bit tensor (entries, heads, length, width) with contiguous rows:
// 16-byte alignment of data and strides, no zero strides.
inline bool tma_can_load(const Strided& x, int64_t entries, int64_t heads, int64_t length) {
  constexpr int64_t kMostRows = int64_t{1} << 31, kFarthest = int64_t{1} << 39;
  const int64_t sizes[] = {entries, heads, length};
  if (reinterpret_cast<uintptr_t>(x.data) % 16 != 0 || length > kMostRows) return false;
  for (int n = 0; n < 3; ++n) {
    if (sizes[n] == 0) return false;
    const bool steps = x.stride[n] > 0 && x.stride[n] < kFarthest && x.stride[n] % 8 == 0;
    if (sizes[n] > 1 && !steps) return false;
  }
  return true;
}

// TMA stores whole 16-byte chunks, so the width must fill the last one of a row.
inline bool tma_can_store(const Strided& x, int64_t entries, int64_t heads, int64_t length,
                          int64_t width) {
  return width % 8 == 0 && tma_can_load(x, entries, heads, length);
}

// Width of the narrowest tile that holds D and D_v; zero if none does.
inline Widths widths_of(const Problem& p) {
  for (const Widths widths : kHopperWidths) {
    if (p.D <= widths.width && p.D_v <= widths.v_width) return widths;
  }
  return {};
}

constexpr const char* kUnmapped = "TMA needs addresses, strides and widths of whole 16 bytes";

// The reason why the kernels support neither pass of a problem; null if they may.
inline const char* reason_against(const Problem& p) {
  if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return "not half precision";
  if (p.score.relative_keys) return "relative keys";
  if (widths_of(p).width == 0) return "D or D_v is too wide";
  const bool mapped = tma_can_load(p.q, p.B, p.H_q, p.M) && tma_can_load(p.k, p.B, p.H_kv, p.N) &&
                      tma_can_load(p.v, p.B, p.H_kv, p.N);
  return mapped ? nullptr : kUnmapped;
}

inline const char* reason_against(const ForwardParams& p) {
  const char* const reason = reason_against(static_cast<const Problem&>(p));
  if (reason) return reason;
  return tma_can_store(p.o, p.B, p.H_q, p.M, p.D_v) ? nullptr : kUnmapped;
}

// dbias and drelative_bias are not covered: sm80 always computes them.
inline const char* reason_against(const BackwardParams& p) {
  const char* const reason = reason_against(static_cast<const Problem&>(p));
  if (reason) return reason;
  const bool mapped = tma_can_load(p.d_o, p.B, p.H_q, p.M) &&
                      tma_can_store(p.dk, p.B, p.H_kv, p.N, p.D) &&
                      tma_can_store(p.dv, p.B, p.H_kv, p.N, p.D_v);
  return mapped ? nullptr : kUnmapped;
}

}  // namespace tk::cuda::sm90
