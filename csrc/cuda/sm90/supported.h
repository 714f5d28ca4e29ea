// Which problems the kernels for Hopper take, and with which tiles. Plain C++: the host asks it
// before a launch, and the module tells Python.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "cuda/common/tile_config.h"

namespace tk::cuda::sm90 {

// What TMA asks of a tensor of halves, (entries, heads, length, width) in rows.
inline bool has_map(const Strided& x, int64_t entries, int64_t heads, int64_t length) {
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

// TMA stores 16 bytes at a time, also behind the last element of a row.
inline bool has_map_to_store(const Strided& x, int64_t entries, int64_t heads, int64_t length,
                             int64_t width) {
  return width % 8 == 0 && has_map(x, entries, heads, length);
}

inline bool have_maps(const Problem& p) {
  const bool halves = p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16;
  return halves && has_map(p.q, p.B, p.H_q, p.M) && has_map(p.k, p.B, p.H_kv, p.N) &&
         has_map(p.v, p.B, p.H_kv, p.N);
}

// The narrowest tile that holds the rows; zeros if none does.
inline Widths widths_of(const Problem& p) {
  for (const Widths widths : kHopperWidths) {
    if (p.D <= widths.width && p.D_v <= widths.v_width) return widths;
  }
  return {};
}

inline Widths forward_widths(const ForwardParams& p) {
  const bool mapped = have_maps(p) && has_map_to_store(p.o, p.B, p.H_q, p.M, p.D_v);
  return mapped ? widths_of(p) : Widths{};
}

// dbias is left to sm80 in any case.
inline Widths backward_widths(const BackwardParams& p) {
  const bool mapped = have_maps(p) && has_map(p.d_o, p.B, p.H_q, p.M) &&
                      has_map_to_store(p.dk, p.B, p.H_kv, p.N, p.D) &&
                      has_map_to_store(p.dv, p.B, p.H_kv, p.N, p.D_v);
  return mapped ? widths_of(p) : Widths{};
}

}  // namespace tk::cuda::sm90
