// Block iteration over visible tiles, and masking of their elements.
#pragma once

#include "common/mask.h"
#include "cuda/common/mma.cuh"

namespace tk::cuda {

// Visibility of a tile under the element mask, read from the block mask.
TK_DEVICE Visible element_mask_of(const Problem& p, const Sequence& s, int h, int i0, int i1,
                                  int j0, int j1) {
  if (!p.mask.block_mask) return Visible::kFull;
  bool some = false, all = true;
  for (int i = i0; i < i1; i = (i / kBlockMaskSize + 1) * kBlockMaskSize) {
    for (int j = j0; j < j1; j = (j / kBlockMaskSize + 1) * kBlockMaskSize) {
      const Visible entry = block_mask_entry(p.mask, s.b, h, i, j);
      some |= entry != Visible::kEmpty;
      all &= entry == Visible::kFull;
    }
  }
  return all ? Visible::kFull : some ? Visible::kPartial : Visible::kEmpty;
}

// Visibility of the tile of queries i0 <= i < i1 and keys j0 <= j < j1, where i1 <= M and j1 may
// exceed N. Both ends of a row's key interval grow with the row, so that testing the first and the
// last row suffices.
TK_DEVICE Visible tile_visible(const Problem& p, const Sequence& s, int h, int i0, int i1, int j0,
                               int j1) {
  const int first = max(j0, s.begin), last = min(j1, s.end) - 1;
  if (first > last || i0 + s.low > last || i1 - 1 + s.high < first) return Visible::kEmpty;
  const bool all = s.row_begin(i1 - 1) <= j0 && j1 <= s.row_end(i0);
  const Visible element_mask = element_mask_of(p, s, h, i0, i1, j0, min(j1, s.N));
  return all || element_mask == Visible::kEmpty ? element_mask : Visible::kPartial;
}

struct Block {
  int index;  // -1 = no further block
  bool full;  // every element is visible
};

// Iterates over the blocks of a row or column of tiles in ascending order and skips empty ones. A
// warp tests 32 blocks at once; every warp of a CTA computes the same result.
template <typename VisibleAt>
class BlockIterator {
 public:
  TK_DEVICE_METHOD BlockIterator(BlockRange range, const VisibleAt& visible)
      : range_(range), window_(range.first - kWarp), visible_(visible) {}

  TK_DEVICE_METHOD Block next() {
    while (!some_) {
      window_ += kWarp;
      if (window_ >= range_.last) return {-1, false};
      scan();
    }
    const int bit = __ffs(static_cast<int>(some_)) - 1;
    some_ &= some_ - 1;
    return {window_ + bit, (full_ >> bit & 1) != 0};
  }

  // Number of visible blocks before block n. Call it on a new iterator.
  TK_DEVICE_METHOD int before(int n) {
    int count = 0;
    while ((window_ += kWarp) < min(range_.last, n)) {
      scan();
      const int bits = min(n - window_, kWarp);
      count += __popc(static_cast<int>(some_ & ~0u >> (kWarp - bits)));
    }
    return count;
  }

 private:
  TK_DEVICE_METHOD void scan() {
    const int n = window_ + lane_index();
    const Visible visible = n < range_.last ? visible_(n) : Visible::kEmpty;
    some_ = __ballot_sync(~0u, visible != Visible::kEmpty);
    full_ = __ballot_sync(~0u, visible == Visible::kFull);
  }

  BlockRange range_;
  int window_;
  uint32_t some_ = 0, full_ = 0;
  VisibleAt visible_;
};

// True if query i sees key j.
TK_DEVICE bool is_visible(const Problem& p, const Sequence& s, int h, int i, int j) {
  if (j < s.row_begin(i) || j >= s.row_end(i)) return false;
  return !has_element_mask(p.mask) || element_visible(p.mask, s.b, h, i, j);
}

// Sets hidden scores to -inf. The accumulator's first element is query i0 and key j0.
template <RowsAre kRows = RowsAre::kQueries, int kM, int kN>
TK_DEVICE void apply_mask(Accumulator<kM, kN>& scores, const Problem& p, const Sequence& s, int h,
                          int i0, int j0) {
  constexpr bool kQueries = kRows == RowsAre::kQueries;
  scores.for_each([&](int row, int column, float& x) {
    const int i = i0 + (kQueries ? row : column), j = j0 + (kQueries ? column : row);
    if (j < s.row_begin(i) || j >= s.row_end(i)) x = -INFINITY;
  });
  if (!has_element_mask(p.mask)) return;
  const auto apply_element_mask = [&](int row, int column, float& x) {
    const int i = i0 + (kQueries ? row : column), j = j0 + (kQueries ? column : row);
    if (i < s.M && j < s.N && !element_visible(p.mask, s.b, h, i, j)) x = -INFINITY;
  };
  for_each_in_memory(apply_element_mask, scores);
}

}  // namespace tk::cuda
