// Live keys: keys visible to at least one query under the diagonals, key ranges and segments. Dead
// keys may hold NaN and must not enter a matrix product.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/params.h"

namespace tk {

// (B, N), 1 for live keys; empty if all keys are live.
inline std::vector<uint8_t> find_live_keys(const Problem& p) {
  const MaskParams& mask = p.mask;
  const int64_t first = std::max<int64_t>(mask.diagonal_low, 0);
  const int64_t last = std::min(p.M - 1 + mask.diagonal_high, p.N - 1);
  const bool by_diagonals = first > 0 || last < p.N - 1;
  if (!by_diagonals && !mask.key_start && !mask.key_end && !mask.q_segments) return {};

  std::vector<uint8_t> live(static_cast<size_t>(p.B * p.N));
  std::vector<int64_t> ids;
  for (int64_t b = 0; b < p.B; ++b) {
    const int64_t begin = mask.key_start ? std::max(first, mask.key_start[b]) : first;
    const int64_t end = mask.key_end ? std::min(last + 1, mask.key_end[b]) : last + 1;
    if (mask.q_segments) {
      ids.assign(mask.q_segments + b * p.M, mask.q_segments + (b + 1) * p.M);
      if (!std::is_sorted(ids.begin(), ids.end())) std::sort(ids.begin(), ids.end());
    }
    bool visible = true;
    for (int64_t j = begin; j < end; ++j) {
      const int64_t* const id = mask.k_segments ? mask.k_segments + b * p.N + j : nullptr;
      const bool same_as_previous = j > begin && (!id || id[0] == id[-1]);
      if (id && !same_as_previous) visible = std::binary_search(ids.begin(), ids.end(), *id);
      live[static_cast<size_t>(b * p.N + j)] = visible;
    }
  }
  return live;
}

}  // namespace tk
