// Which tiles a block visits, and which of their elements are visible.
#pragma once

#include "common/mask.h"
#include "cuda/common/mma.cuh"

namespace tk::cuda {

TK_DEVICE int ceil_divide(int x, int y) { return (x + y - 1) / y; }

// first <= n < last
struct BlockRange {
  int first, last;
};

// Blocks outside of which nothing is visible: of keys, for queries i0 <= i < i1; and of queries,
// for keys j0 <= j < j1, because i + low <= j <= i + high.
TK_DEVICE BlockRange key_blocks(const Sequence& s, int i0, int i1, int block_n) {
  return {s.row_begin(i0) / block_n, ceil_divide(s.row_end(i1 - 1), block_n)};
}
TK_DEVICE BlockRange query_blocks(const Sequence& s, int j0, int j1, int block_m) {
  const int first = max(j0, s.begin), last = min(j1, s.end) - 1;
  if (first > last) return {0, 0};
  return {max(first - s.high, 0) / block_m,
          ceil_divide(max(min(last - s.low + 1, s.M), 0), block_m)};
}

// What dense masks, layouts and segments leave of a tile.
TK_DEVICE Visible element_mask_of(const Problem& p, const Sequence& s, int h, int i0, int i1,
                                  int j0, int j1) {
  if (!p.mask.block_mask) return Visible::kAll;
  bool some = false, all = true;
  for (int i = i0; i < i1; i = (i / kBlockMaskSize + 1) * kBlockMaskSize) {
    for (int j = j0; j < j1; j = (j / kBlockMaskSize + 1) * kBlockMaskSize) {
      const Visible entry = block_mask_entry(p.mask, s.b, h, i, j);
      some |= entry != Visible::kNone;
      all &= entry == Visible::kAll;
    }
  }
  return all ? Visible::kAll : some ? Visible::kSome : Visible::kNone;
}

// The tile of queries i0 <= i < i1 and keys j0 <= j < j1; i1 is at most M, j1 may lie beyond N.
// Both ends of a row's interval of keys grow with the row: the first and the last row tell for all.
TK_DEVICE Visible tile_visible(const Problem& p, const Sequence& s, int h, int i0, int i1, int j0,
                               int j1) {
  const int first = max(j0, s.begin), last = min(j1, s.end) - 1;
  if (first > last || i0 + s.low > last || i1 - 1 + s.high < first) return Visible::kNone;
  const bool all = s.row_begin(i1 - 1) <= j0 && j1 <= s.row_end(i0);
  const Visible flags = element_mask_of(p, s, h, i0, i1, j0, min(j1, s.N));
  return all || flags == Visible::kNone ? flags : Visible::kSome;
}

struct Block {
  int index;  // -1: there is none
  bool full;  // all of it is visible
};

// The blocks of a line of tiles, ascending, those that are hidden left out. A warp looks at 32 of
// them at once, and every warp of a thread block sees the same.
template <typename VisibleAt>
class BlockIterator {
 public:
  TK_DEVICE_METHOD BlockIterator(BlockRange span, const VisibleAt& visible)
      : span_(span), window_(span.first - kWarp), visible_(visible) {}

  // From the first block on, of what is visible now.
  TK_DEVICE_METHOD void restart() {
    window_ = span_.first - kWarp;
    some_ = 0;
  }

  TK_DEVICE_METHOD Block next() {
    while (!some_) {
      window_ += kWarp;
      if (window_ >= span_.last) return {-1, false};
      scan();
    }
    const int bit = __ffs(static_cast<int>(some_)) - 1;
    some_ &= some_ - 1;
    return {window_ + bit, (full_ >> bit & 1) != 0};
  }

  // How many come before block n.
  TK_DEVICE_METHOD int before(int n) {
    int count = 0;
    while ((window_ += kWarp) < min(span_.last, n)) {
      scan();
      const int bits = min(n - window_, kWarp);
      count += __popc(static_cast<int>(some_ & ~0u >> (kWarp - bits)));
    }
    return count;
  }

 private:
  TK_DEVICE_METHOD void scan() {
    const int n = window_ + lane_index();
    const Visible visible = n < span_.last ? visible_(n) : Visible::kNone;
    some_ = __ballot_sync(~0u, visible != Visible::kNone);
    full_ = __ballot_sync(~0u, visible == Visible::kAll);
  }

  BlockRange span_;
  int window_;
  uint32_t some_ = 0, full_ = 0;
  VisibleAt visible_;
};

// Whether query i sees key j.
TK_DEVICE bool is_visible(const Problem& p, const Sequence& s, int h, int i, int j) {
  if (j < s.row_begin(i) || j >= s.row_end(i)) return false;
  return !needs_flags(p.mask) || flag(p.mask, p.M, p.N, s.b, h, i, j);
}

// What the rows of an accumulator are; its columns are the other.
enum class RowsAre { kQueries, kKeys };

// Sets scores that are hidden to -inf. The accumulator's first element is (i0, j0).
template <RowsAre kRows = RowsAre::kQueries, int kM, int kN>
TK_DEVICE void apply_mask(Accumulator<kM, kN>& scores, const Problem& p, const Sequence& s, int h,
                          int i0, int j0) {
  constexpr bool kQueries = kRows == RowsAre::kQueries;
  scores.for_each([&](int row, int column, float& x) {
    const int i = i0 + (kQueries ? row : column), j = j0 + (kQueries ? column : row);
    if (j < s.row_begin(i) || j >= s.row_end(i)) x = -INFINITY;
  });
  if (!needs_flags(p.mask)) return;
  const auto apply_element_mask = [&](int row, int column, float& x) {
    const int i = i0 + (kQueries ? row : column), j = j0 + (kQueries ? column : row);
    if (i < s.M && j < s.N && !flag(p.mask, p.M, p.N, s.b, h, i, j)) x = -INFINITY;
  };
  for_each_in_memory(apply_element_mask, scores);
}

}  // namespace tk::cuda
