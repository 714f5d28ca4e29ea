"""Blocks that a query block or a key block visits: ranges of the band, or a block list."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class BlockLists(NamedTuple):
    """Blocks that each row block visits. `indices` holds partial blocks from the front and full
    blocks from the back, `counts` the number of each. None if no block mask is needed.
    """

    indices: Tensor | None
    counts: Tensor | None
    stride_b: int
    stride_h: int
    columns: int


NO_LISTS = BlockLists(None, None, 0, 0, 0)


class BlockRanges(NamedTuple):
    """Blocks any_begin..any_end are visible at least partially, all_begin..all_end fully."""

    any_begin: Any
    all_begin: Any
    all_end: Any
    any_end: Any


class Schedule(NamedTuple):
    """Visited blocks: full ones n in full_begin..full_end, and `num_partial` partial ones.

    Partial block t has n = first_partial + t, plus `gap` (the full blocks in between) for
    t >= before. `row` is the offset of the row block's list.
    """

    num_partial: Any
    first_partial: Any
    before: Any
    gap: Any
    full_begin: Any
    full_end: Any
    row: Any


@triton.jit
def block_ranges(first, last, low, high, begin, end, BLOCK: tl.constexpr):
    """Ranges visible to rows first..last, where row r sees columns
    max(begin, r + low) <= c < min(end, r + high + 1)"""
    any_begin = tl.maximum(begin, first + low) // BLOCK
    any_end = tl.cdiv(tl.maximum(tl.minimum(end, last + high + 1), 0), BLOCK)
    any_end = tl.maximum(any_end, any_begin)
    all_begin = tl.cdiv(tl.maximum(begin, last + low), BLOCK)
    all_begin = tl.minimum(tl.maximum(all_begin, any_begin), any_end)
    all_end = tl.maximum(tl.minimum(end, first + high + 1), 0) // BLOCK
    all_end = tl.minimum(tl.maximum(all_end, all_begin), any_end)
    return BlockRanges(any_begin, all_begin, all_end, any_end)


@triton.jit
def key_block_ranges(band, i0, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Ranges of keys, for the query block at i0"""
    last = tl.minimum(i0 + BLOCK_M, band.M) - 1
    return block_ranges(i0, last, band.low, band.high, band.begin, band.end, BLOCK_N)


@triton.jit
def query_block_ranges(band, j0, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Ranges of queries, for the key block at j0: i + low <= j is i <= j - low"""
    last = tl.minimum(j0 + BLOCK_N, band.end) - 1
    first = tl.maximum(j0, band.begin)
    any_begin, all_begin, all_end, any_end = block_ranges(
        first, last, -band.high, -band.low, 0, band.M, BLOCK_M
    )
    if first > last:
        any_end = any_begin
    if (first > j0) | (last < j0 + BLOCK_N - 1) | (first > last):
        all_begin, all_end = any_end, any_end
    return BlockRanges(any_begin, all_begin, all_end, any_end)


@triton.jit
def block_schedule(ranges, lists, b, h, block, GRAIN: tl.constexpr, BLOCK: tl.constexpr):
    """`Schedule` of a row block, from its ranges or from its list"""
    if lists.indices is None:
        full, before = ranges.all_end - ranges.all_begin, ranges.all_begin - ranges.any_begin
        num_partial = ranges.any_end - ranges.any_begin - full
        return Schedule(
            num_partial, ranges.any_begin, before, full, ranges.all_begin, ranges.all_end, 0
        )
    else:
        STEPS: tl.constexpr = GRAIN // BLOCK
        row = tl.cast(b, tl.int64) * lists.stride_b + tl.cast(h, tl.int64) * lists.stride_h + block
        num_partial = tl.load(lists.counts + 2 * row) * STEPS
        num_full = tl.load(lists.counts + 2 * row + 1) * STEPS
        end = lists.columns * STEPS
        return Schedule(num_partial, 0, num_partial, 0, end - num_full, end, row * lists.columns)


@triton.jit
def visits(schedule, PARTIAL: tl.constexpr):
    """Bounds of the loop over the full blocks, or over the partial ones"""
    if PARTIAL:
        return 0, schedule.num_partial
    else:
        return schedule.full_begin, schedule.full_end


@triton.jit
def block_start(
    schedule, lists, n, PARTIAL: tl.constexpr, GRAIN: tl.constexpr, BLOCK: tl.constexpr
):
    """First row or column of block n of the loop"""
    if PARTIAL:
        n = schedule.first_partial + n + tl.where(n < schedule.before, 0, schedule.gap)
    if lists.indices is None:
        return n * BLOCK
    else:
        STEPS: tl.constexpr = GRAIN // BLOCK
        return tl.load(lists.indices + schedule.row + n // STEPS) * GRAIN + n % STEPS * BLOCK
