"""Which blocks a block visits, and which elements of a block are visible."""

import triton
import triton.language as tl


@triton.jit
def key_range(mask, b, N):
    """(begin, end) of the keys that the mask's range leaves"""
    begin = 0
    end = N
    if mask.key_start is not None:
        begin = tl.minimum(tl.maximum(tl.load(mask.key_start + b), 0), N).to(tl.int32)
    if mask.key_end is not None:
        end = tl.minimum(tl.maximum(tl.load(mask.key_end + b), 0), N).to(tl.int32)
    return begin, end


@triton.jit
def is_used(j, low, high, begin, end, M):
    """Whether diagonals and the range begin..end show key j to some query. What they do not is
    never loaded: it may be NaN, and 0 * NaN is NaN."""
    return (j >= tl.maximum(begin, low)) & (j < tl.minimum(end, M + high))


@triton.jit
def without_unseen(tile, shown, mask):
    """The tile of keys or values, 0 in keys whose segment no query here is of"""
    if mask.q_segments is not None:
        sees = tl.max(shown.to(tl.int32), axis=0) > 0
        tile = tl.where(sees[:, None], tile, 0.0)
    return tile


@triton.jit
def visible(mask, low, high, begin, end, b, h, i, j, M, N):
    """bool, of the shape to which i and j broadcast; False outside M x N"""
    # Two comparisons an element: what depends on the row alone is one number a row.
    last = tl.where(i < M, tl.minimum(i + high + 1, end), 0)
    shown = (j >= tl.maximum(i + low, begin)) & (j < last)
    if mask.q_segments is not None or mask.dense is not None or mask.layout is not None:
        shown = shown & flagged(mask, b, h, i, j, M, N)
    return shown


@triton.jit
def flagged(mask, b, h, i, j, M, N):
    """What segments, dense flags and the layout show; False outside M x N"""
    shown = (i < M) & (j < N)
    inside = shown
    if mask.q_segments is not None:
        q_id = tl.load(mask.q_segments + tl.cast(b, tl.int64) * M + i, mask=i < M, other=0)
        k_id = tl.load(mask.k_segments + tl.cast(b, tl.int64) * N + j, mask=j < N, other=0)
        shown = shown & (q_id == k_id)
    if mask.dense is not None:
        by_b, by_h = tl.cast(b, tl.int64) * mask.dense_b, tl.cast(h, tl.int64) * mask.dense_h
        by_i, by_j = i.to(tl.int64) * mask.dense_i, j.to(tl.int64) * mask.dense_j
        at = mask.dense + by_b + by_h + by_i + by_j
        shown = shown & (tl.load(at, mask=(i < M) & (j < mask.columns), other=0) != 0)
    if mask.layout is not None:
        row, column = i // mask.block_size, j // mask.block_size
        by_h = tl.cast(h, tl.int64) * mask.layout_h
        at = mask.layout + by_h + row * mask.layout_i + column * mask.layout_j
        shown = shown & (tl.load(at, mask=inside, other=0) != 0)
    return shown


@triton.jit
def spans(first, last, low, high, begin, end, BLOCK: tl.constexpr):
    """Blocks that rows first..last see, where row r sees max(begin, r + low) <= c < min(end,
    r + high + 1): (where any begin, where all begin, where all end, where any end), in blocks"""
    any_begin = tl.maximum(begin, first + low) // BLOCK
    any_end = tl.cdiv(tl.maximum(tl.minimum(end, last + high + 1), 0), BLOCK)
    any_end = tl.maximum(any_end, any_begin)
    all_begin = tl.cdiv(tl.maximum(begin, last + low), BLOCK)
    all_begin = tl.minimum(tl.maximum(all_begin, any_begin), any_end)
    all_end = tl.maximum(tl.minimum(end, first + high + 1), 0) // BLOCK
    all_end = tl.minimum(tl.maximum(all_end, all_begin), any_end)
    return any_begin, all_begin, all_end, any_end


@triton.jit
def key_spans(low, high, begin, end, i0, M, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`spans` of keys for the queries from i0"""
    return spans(i0, tl.minimum(i0 + BLOCK_M, M) - 1, low, high, begin, end, BLOCK_N)


@triton.jit
def query_spans(low, high, begin, end, j0, M, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`spans` of queries for the keys from j0: i + low <= j is i <= j - low"""
    last = tl.minimum(j0 + BLOCK_N, end) - 1
    first = tl.maximum(j0, begin)
    any_begin, all_begin, all_end, any_end = spans(first, last, -high, -low, 0, M, BLOCK_M)
    if first > last:
        any_end = any_begin
    if (first > j0) | (last < j0 + BLOCK_N - 1) | (first > last):
        all_begin, all_end = any_end, any_end
    return any_begin, all_begin, all_end, any_end


@triton.jit
def visits(spans, lists, b, h, block, GRAIN: tl.constexpr, BLOCK: tl.constexpr):
    """What a block of rows visits: (how many blocks in part, from, how many before the gap, over
    which gap; how many in full, from; and where its list is)"""
    if lists.indices is None:
        any_begin, all_begin, all_end, any_end = spans
        in_full = all_end - all_begin
        before = all_begin - any_begin
        in_part = any_end - any_begin - in_full
        return in_part, any_begin, before, in_full, in_full, all_begin, 0
    else:
        STEPS: tl.constexpr = GRAIN // BLOCK
        row = tl.cast(b, tl.int64) * lists.stride_b + tl.cast(h, tl.int64) * lists.stride_h + block
        in_part = tl.load(lists.counts + 2 * row) * STEPS
        in_full = tl.load(lists.counts + 2 * row + 1) * STEPS
        full_from = lists.columns * STEPS - in_full
        return in_part, 0, in_part, 0, in_full, full_from, row * lists.columns


@triton.jit
def block_start(lists, row, n, GRAIN: tl.constexpr, BLOCK: tl.constexpr):
    """The first index in block n of those visited"""
    if lists.indices is None:
        return n * BLOCK
    else:
        STEPS: tl.constexpr = GRAIN // BLOCK
        return tl.load(lists.indices + row + n // STEPS) * GRAIN + n % STEPS * BLOCK
