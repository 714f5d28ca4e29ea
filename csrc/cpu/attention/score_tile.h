// A tile of scores: which keys and queries it holds, and how much of it is visible.
//
// Tiles are transposed: a row holds one key's scores with kQueries queries, so that the softmax
// runs down columns, one query in each lane.
#pragma once

#include <algorithm>

#include "common/mask.h"
#include "cpu/engine/pack.h"

namespace tk::cpu::TK_ISA {

static_assert(kBlock == kBlockMaskSize);

// Keys that some query may see, as far as diagonals and the key range tell.
TK_INLINE KeyInterval seen_keys(const Problem& p, int64_t b) {
  if (p.M == 0) return {0, 0};
  return block_interval(p.mask, p.N, b, 0, p.M);
}

// Whether block n of keys, or one of `count` from there on, has any of them.
TK_INLINE bool is_seen(KeyInterval seen, int64_t n, int64_t count = 1) {
  return seen.begin < (n + count) * kBlock && seen.end > n * kBlock;
}

// A block's keys are computed in groups of so many; its queries too, in the backward pass.
constexpr int64_t kKeyGroup = 32;

// Rows of each panel of an operand: a block of them, or the groups that there are.
TK_INLINE int64_t panel_rows(int64_t length) {
  return std::clamp(round_up(length, kKeyGroup), kKeyGroup, kBlock);
}

// `keys` keys, from the block's `first` on, against `queries` of the group's queries, which start
// with query i0 of head h. per_head queries of a head come before those of the next one.
struct Block {
  int64_t b, h, i0, j0;  // the block of keys begins with key j0
  int64_t queries, per_head;
  int64_t first, keys;  // whole groups
  Visible visible;
  bool flagged;                    // dense, layout or segments hide some of it
  int64_t next_i = 0, next_j = 0;  // the tile that is likely to follow, as seen from this one

  // Divisions only where heads share the tile.
  int64_t head(int64_t lane) const { return lane < per_head ? h : h + lane / per_head; }
  int64_t query(int64_t lane) const { return i0 + (lane < per_head ? lane : lane % per_head); }
  int64_t key(int64_t row) const { return j0 + first + row; }
  int64_t computed_queries() const { return round_up(queries, kKeyGroup); }
};

// Sees what is visible, and leaves out keys before the first visible one and behind the last.
TK_INLINE void look(const Problem& p, Block& block) {
  const int64_t last_query = block.query(block.queries - 1);
  const int64_t i1 = block.queries > block.per_head ? block.per_head : last_query + 1;
  block.visible = Visible::kNone;
  block.flagged = false;
  for (int64_t h = block.h; h <= block.head(block.queries - 1); ++h) {
    // Keys beyond N count as hidden: a block that reaches over the end is never wholly visible.
    const Visible visible =
        block_visible(p.mask, p.N, block.b, h, block.i0, i1, block.j0, block.j0 + kBlock);
    if (h == block.h) {
      block.visible = visible;
    } else if (block.visible != visible) {
      block.visible = Visible::kSome;
    }
    block.flagged |= block_mask_entry(p.mask, block.b, h, block.i0, block.j0) != Visible::kAll;
  }
  if (block.visible == Visible::kNone) return;
  const KeyInterval keys = block_interval(p.mask, p.N, block.b, block.i0, i1);
  block.first = keys.begin > block.j0 ? (keys.begin - block.j0) / kKeyGroup * kKeyGroup : 0;
  const int64_t end = keys.end - block.j0;
  block.keys = (end < kBlock ? round_up(end, kKeyGroup) : kBlock) - block.first;
  if (block.keys <= 0) block.visible = Visible::kNone;
}

TK_INLINE Block make_block(const Problem& p, int64_t b, int64_t h, int64_t i0, int64_t queries,
                           int64_t j0) {
  Block block{b, h, i0, j0, p.M - i0 < queries ? p.M - i0 : queries, queries, 0, 0, {}, {}};
  look(p, block);
  return block;
}

template <typename Real>
TK_INLINE void clear(Real* x, int64_t count) {
  __builtin_memset(x, 0, static_cast<size_t>(count) * sizeof(Real));
}

template <typename Real, typename Visit>
TK_INLINE void for_each_vector(Real* tile, int64_t count, Visit&& visit) {
#pragma GCC unroll 4
  for (int64_t c = 0; c < count; c += kLanes<Real>) store(tile + c, visit(load(tile + c), c));
}

}  // namespace tk::cpu::TK_ISA
