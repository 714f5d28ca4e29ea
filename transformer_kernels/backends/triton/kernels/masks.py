"""Mask evaluation: the blocks that a block visits, and the element mask inside a block."""

import triton
import triton.language as tl


@triton.jit
def key_range(mask, b, N):
    """(begin, end): the key range of batch entry b, clamped to 0..N"""
    begin = 0
    end = N
    if mask.key_start is not None:
        begin = tl.minimum(tl.maximum(tl.load(mask.key_start + b), 0), N).to(tl.int32)
    if mask.key_end is not None:
        end = tl.minimum(tl.maximum(tl.load(mask.key_end + b), 0), N).to(tl.int32)
    return begin, end


@triton.jit
def is_live(j, low, high, begin, end, M):
    """True if key j is visible to at least one query under the band and the range begin..end. Other
    keys are not loaded: they may hold NaN, and 0 * NaN is NaN."""
    return (j >= tl.maximum(begin, low)) & (j < tl.minimum(end, M + high))


@triton.jit
def zero_hidden_keys(tile, is_visible, mask):
    """The tile of keys or values, with 0 for keys that the element mask hides from every query of
    this tile"""
    if mask.q_segments is not None or mask.dense is not None or mask.layout is not None:
        key_is_live = tl.max(is_visible.to(tl.int32), axis=0) > 0
        tile = tl.where(key_is_live[:, None], tile, 0.0)
    return tile


@triton.jit
def visible(mask, low, high, begin, end, b, h, i, j, M, N):
    """Element mask: bool, of the shape to which i and j broadcast; False outside M x N"""
    # Two comparisons per element: the bounds of the interval depend on the row only.
    last = tl.where(i < M, tl.minimum(i + high + 1, end), 0)
    is_visible = (j >= tl.maximum(i + low, begin)) & (j < last)
    if mask.q_segments is not None or mask.dense is not None or mask.layout is not None:
        is_visible = is_visible & element_mask(mask, b, h, i, j, M, N)
    return is_visible


@triton.jit
def element_mask(mask, b, h, i, j, M, N):
    """Element mask of segments, dense mask and layout only; False outside M x N"""
    is_visible = (i < M) & (j < N)
    inside = is_visible
    if mask.q_segments is not None:
        q_id = tl.load(mask.q_segments + tl.cast(b, tl.int64) * M + i, mask=i < M, other=0)
        k_id = tl.load(mask.k_segments + tl.cast(b, tl.int64) * N + j, mask=j < N, other=0)
        is_visible = is_visible & (q_id == k_id)
    if mask.dense is not None:
        by_b, by_h = tl.cast(b, tl.int64) * mask.dense_b, tl.cast(h, tl.int64) * mask.dense_h
        by_i, by_j = i.to(tl.int64) * mask.dense_i, j.to(tl.int64) * mask.dense_j
        at = mask.dense + by_b + by_h + by_i + by_j
        is_visible = is_visible & (tl.load(at, mask=(i < M) & (j < mask.columns), other=0) != 0)
    if mask.layout is not None:
        row, column = i // mask.block_size, j // mask.block_size
        by_h = tl.cast(h, tl.int64) * mask.layout_h
        by_i, by_j = row.to(tl.int64) * mask.layout_i, column.to(tl.int64) * mask.layout_j
        at = mask.layout + by_h + by_i + by_j
        is_visible = is_visible & (tl.load(at, mask=inside, other=0) != 0)
    return is_visible


@triton.jit
def block_ranges(first, last, low, high, begin, end, BLOCK: tl.constexpr):
    """Block interval visible to rows first..last, where row r sees columns
    max(begin, r + low) <= c < min(end, r + high + 1).

    Returns (any_begin, all_begin, all_end, any_end): blocks any_begin..any_end are visible at least
    partially, all_begin..all_end fully.
    """
    any_begin = tl.maximum(begin, first + low) // BLOCK
    any_end = tl.cdiv(tl.maximum(tl.minimum(end, last + high + 1), 0), BLOCK)
    any_end = tl.maximum(any_end, any_begin)
    all_begin = tl.cdiv(tl.maximum(begin, last + low), BLOCK)
    all_begin = tl.minimum(tl.maximum(all_begin, any_begin), any_end)
    all_end = tl.maximum(tl.minimum(end, first + high + 1), 0) // BLOCK
    all_end = tl.minimum(tl.maximum(all_end, all_begin), any_end)
    return any_begin, all_begin, all_end, any_end


@triton.jit
def key_block_ranges(low, high, begin, end, i0, M, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`block_ranges` of keys, for the query block at i0"""
    return block_ranges(i0, tl.minimum(i0 + BLOCK_M, M) - 1, low, high, begin, end, BLOCK_N)


@triton.jit
def query_block_ranges(low, high, begin, end, j0, M, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`block_ranges` of queries, for the key block at j0: i + low <= j is i <= j - low"""
    last = tl.minimum(j0 + BLOCK_N, end) - 1
    first = tl.maximum(j0, begin)
    any_begin, all_begin, all_end, any_end = block_ranges(first, last, -high, -low, 0, M, BLOCK_M)
    if first > last:
        any_end = any_begin
    if (first > j0) | (last < j0 + BLOCK_N - 1) | (first > last):
        all_begin, all_end = any_end, any_end
    return any_begin, all_begin, all_end, any_end


@triton.jit
def block_schedule(block_ranges, lists, b, h, block, GRAIN: tl.constexpr, BLOCK: tl.constexpr):
    """Blocks that a row block visits, from its block ranges or its block list.

    Returns (num_partial, first_partial, before, gap, num_full, first_full, list_offset). Partial
    block t has index first_partial + t, plus `gap` (the full blocks in between) for t >= before.
    """
    if lists.indices is None:
        any_begin, all_begin, all_end, any_end = block_ranges
        num_full = all_end - all_begin
        before = all_begin - any_begin
        num_partial = any_end - any_begin - num_full
        return num_partial, any_begin, before, num_full, num_full, all_begin, 0
    else:
        STEPS: tl.constexpr = GRAIN // BLOCK
        row = tl.cast(b, tl.int64) * lists.stride_b + tl.cast(h, tl.int64) * lists.stride_h + block
        num_partial = tl.load(lists.counts + 2 * row) * STEPS
        num_full = tl.load(lists.counts + 2 * row + 1) * STEPS
        first_full = lists.columns * STEPS - num_full
        return num_partial, 0, num_partial, 0, num_full, first_full, row * lists.columns


@triton.jit
def block_start(lists, row, n, GRAIN: tl.constexpr, BLOCK: tl.constexpr):
    """First row or column of the n-th visited block"""
    if lists.indices is None:
        return n * BLOCK
    else:
        STEPS: tl.constexpr = GRAIN // BLOCK
        return tl.load(lists.indices + row + n // STEPS) * GRAIN + n % STEPS * BLOCK
