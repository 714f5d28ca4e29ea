// A tile of scores: its keys and queries, and its visibility.
//
// Tiles are transposed, keys x queries: a row holds the scores of one key with kQueries queries.
// The softmax runs down columns, with one query in each lane.
#pragma once

#include <algorithm>

#include "cpu/attention/selected.h"
#include "cpu/engine/pack.h"

namespace tk::cpu::TK_ISA {

static_assert(kBlock == kBlockMaskSize);

// Keys visible to at least one query under the diagonals and the key range; both ends are in 0 ..
// N.
TK_INLINE KeyInterval visible_key_range(const Problem& p, int64_t b) {
  if (p.M == 0) return {0, 0};
  const KeyInterval keys = block_interval(p.mask, p.N, b, 0, p.M);
  return {std::min(keys.begin, p.N), std::max<int64_t>(keys.end, 0)};
}

// True for keys that at least one query sees; others may hold NaN.
struct LiveKeys {
  KeyInterval range;
  const uint8_t* by_element;  // see live_keys_of

  TK_INLINE_METHOD bool operator()(int64_t j) const {
    return j >= range.begin && j < range.end && (!by_element || by_element[j]);
  }
};

// True if any of `count` key blocks from block n on overlaps `range`.
TK_INLINE bool overlaps(KeyInterval range, int64_t n, int64_t count = 1) {
  return range.begin < (n + count) * kBlock && range.end > n * kBlock;
}

// Unit of computation within a block: keys, and largest unit of queries in the backward pass.
constexpr int64_t kKeyGroup = 32;

// Rows of each packed panel: a full block, or the sequence length rounded up to kKeyGroup.
TK_INLINE int64_t panel_rows(int64_t length) {
  return std::clamp(round_up(length, kKeyGroup), kKeyGroup, kBlock);
}

// A block of scores: `keys` keys from the block's key `first` on, against `queries` queries from
// query i0 of head h on. Lanes hold per_head queries of one head, then those of the next head.
struct Block {
  int64_t b, h, i0, j0;  // j0: first key of the key block
  int64_t queries, per_head;
  int64_t first, keys;  // multiples of kKeyGroup
  Visible visible;
  bool element_mask;               // position tests, dense or layout hide part of it
  int64_t query_unit = kKeyGroup;  // of computed_queries
  int64_t next_i = 0, next_j = 0;  // offset of the tile that is likely to be next
  bool continues = false;          // the keys follow those of the last tile of these queries
  Cursors* cursors = nullptr;      // of the queries' lists; null: search in them

  // Divides only if several heads share the tile.
  int64_t head(int64_t lane) const { return lane < per_head ? h : h + lane / per_head; }
  int64_t query(int64_t lane) const { return i0 + (lane < per_head ? lane : lane % per_head); }
  int64_t key(int64_t row) const { return j0 + first + row; }
  int64_t computed_queries() const { return round_up(queries, query_unit); }
};

// Sets the visibility of the block, and clips its keys to the visible range.
TK_INLINE void clip_to_visible(const Problem& p, Block& block) {
  const int64_t last_query = block.query(block.queries - 1);
  const int64_t i1 = block.queries > block.per_head ? block.per_head : last_query + 1;
  block.visible = Visible::kEmpty;
  block.element_mask = false;
  for (int64_t h = block.h; h <= block.head(block.queries - 1); ++h) {
    // Keys past N count as hidden: a block that crosses N is never fully visible.
    const Visible visible =
        block_visible(p.mask, p.N, block.b, h, block.i0, i1, block.j0, block.j0 + kBlock);
    if (h == block.h) {
      block.visible = visible;
    } else if (block.visible != visible) {
      block.visible = Visible::kPartial;
    }
    block.element_mask |=
        block_mask_entry(p.mask, block.b, h, block.i0, block.j0) != Visible::kFull;
  }
  if (block.visible == Visible::kEmpty) return;
  const KeyInterval keys = block_interval(p.mask, p.N, block.b, block.i0, i1);
  block.first = keys.begin > block.j0 ? (keys.begin - block.j0) / kKeyGroup * kKeyGroup : 0;
  const int64_t end = keys.end - block.j0;
  block.keys = (end < kBlock ? round_up(end, kKeyGroup) : kBlock) - block.first;
  if (block.keys <= 0) block.visible = Visible::kEmpty;
}

TK_INLINE Block make_block(const Problem& p, int64_t b, int64_t h, int64_t i0, int64_t queries,
                           int64_t j0) {
  Block block{b, h, i0, j0, p.M - i0 < queries ? p.M - i0 : queries, queries, 0, 0, {}, {}};
  clip_to_visible(p, block);
  return block;
}

template <typename Real, typename Visit>
TK_INLINE void for_each_vector(Real* tile, int64_t count, Visit&& visit) {
#pragma GCC unroll 4
  for (int64_t c = 0; c < count; c += kLanes<Real>) store(tile + c, visit(load(tile + c), c));
}

}  // namespace tk::cpu::TK_ISA
