"""Masks: the arguments of a resolved mask, and the test of an element. All of a mask kind is in
this file, except that block_ranges.py skips blocks outside the band and the key range.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ....masks.resolved import ResolvedMask
from ....problem import Problem
from .arguments import as_uint8, broadcast_strides, contiguous


class MaskTensors(NamedTuple):
    """Tensors of a `ResolvedMask`; bool tensors are viewed as uint8."""

    key_start: Tensor | None
    key_end: Tensor | None
    tests: tl.constexpr
    """number of position tests"""
    q_low: Tensor | None
    q_high: Tensor | None
    q_test: int | None
    """strides (also below): 0 for a dimension of size 1, None if the tensor is None"""
    q_b: int | None
    q_h: int | None
    k_position: Tensor | None
    k_test: int | None
    k_b: int | None
    k_h: int | None
    dense: Tensor | None
    dense_b: int | None
    dense_h: int | None
    dense_i: int | None
    dense_j: int | None
    blocks: Tensor | None
    blocks_h: int | None
    blocks_i: int | None
    blocks_j: int | None
    block_size: int
    selected: Tensor | None
    selected_b: int | None
    selected_h: int | None
    selected_count: int
    selected_size: int
    selected_steps: tl.constexpr
    """steps of a binary search in a list"""
    columns: int | None
    """N if there is a dense mask, else None. Triton specializes on its divisibility by 16, which
    enables 16-byte loads."""
    has_elements: tl.constexpr
    """True if a tensor hides single elements: position tests, a dense mask, blocks or lists"""


def mask_tensors(problem: Problem) -> MaskTensors:
    mask = problem.mask
    dense, blocks = as_uint8(mask.dense), as_uint8(mask.blocks)
    dense_b, dense_h, dense_i, dense_j = broadcast_strides(dense, 4)
    blocks_h, blocks_i, blocks_j = broadcast_strides(blocks, 3)
    q_low, k_position = contiguous(mask.q_low), contiguous(mask.k_position)
    selected = contiguous(mask.selected)
    selected_b, selected_h, _, _ = broadcast_strides(selected, 4)
    count = 0 if selected is None else selected.shape[3]
    q_test, q_b, q_h, _ = broadcast_strides(q_low, 4)
    k_test, k_b, k_h, _ = broadcast_strides(k_position, 4)
    return MaskTensors(
        key_start=contiguous(mask.key_start),
        key_end=contiguous(mask.key_end),
        tests=tl.constexpr(0 if q_low is None else q_low.shape[0]),
        q_low=q_low,
        q_high=contiguous(mask.q_high),
        q_test=q_test,
        q_b=q_b,
        q_h=q_h,
        k_position=k_position,
        k_test=k_test,
        k_b=k_b,
        k_h=k_h,
        dense=dense,
        dense_b=dense_b,
        dense_h=dense_h,
        dense_i=dense_i,
        dense_j=dense_j,
        blocks=blocks,
        blocks_h=blocks_h,
        blocks_i=blocks_i,
        blocks_j=blocks_j,
        block_size=mask.block_size,
        selected=selected,
        selected_b=selected_b,
        selected_h=selected_h,
        selected_count=count,
        selected_size=mask.selected_size,
        selected_steps=tl.constexpr(count.bit_length()),
        columns=None if dense is None else problem.shape.N,
        has_elements=tl.constexpr(mask.has_element_mask),
    )


def bytes_per_score(mask: ResolvedMask) -> int:
    """Returns the bytes that a dense mask, a block pattern and lists load per score."""
    loaded = mask.dense, mask.blocks, mask.selected
    return sum(x.element_size() for x in loaded if x is not None)


def bytes_per_key(mask: ResolvedMask) -> int:
    """Returns an upper bound of the bytes that position tests load per query or key."""
    return 0 if mask.q_low is None else 16 * mask.q_low.shape[0]


class Band(NamedTuple):
    """Scores of one sequence: query i < M sees key j if begin <= j < end and
    i + low <= j <= i + high.

    `offset` is that of ALiBi. The relative bias of (i, j) is element i + relative_offset - j of a
    table of `distances` elements.
    """

    M: Any
    N: Any
    low: Any
    high: Any
    begin: Any
    end: Any
    offset: Any
    relative_offset: Any
    distances: Any


@triton.jit
def sequence_band(mask, sequences, b, max_M, max_N, M, N, low, high, offset):
    """`Band` of sequence b: M of at most max_M queries, N of at most max_N keys"""
    shift = sequences.bottom_right * (N - M)
    # Relative biases begin with distance 1 - max_N or, from the bottom right corner, 1 - max_M.
    relative_offset = max_N - 1 + sequences.bottom_right * (max_M - max_N) + shift
    return band_of(
        mask, b, M, N, low + shift, high + shift, offset + shift, relative_offset, max_M + max_N - 1
    )


@triton.jit
def band_of(mask, b, M, N, low, high, offset, relative_offset, distances):
    """`Band` of batch entry b, with its key range clamped to 0..N"""
    begin = 0
    end = N
    if mask.key_start is not None:
        begin = tl.minimum(tl.maximum(tl.load(mask.key_start + b), 0), N).to(tl.int32)
    if mask.key_end is not None:
        end = tl.minimum(tl.maximum(tl.load(mask.key_end + b), 0), N).to(tl.int32)
    return Band(M, N, low, high, begin, end, offset, relative_offset, distances)


@triton.jit
def is_live(j, band):
    """True if key j is visible to at least one query of the band. Other keys are not loaded: they
    may hold NaN, and 0 * NaN is NaN."""
    return (j >= tl.maximum(band.begin, band.low)) & (j < tl.minimum(band.end, band.M + band.high))


@triton.jit
def visible(mask, band, coords):
    """Element mask of a tile; False outside M x N"""
    i, j = coords.i, coords.j
    # Two comparisons per element: the bounds of the interval depend on the row only.
    last = tl.where(i < band.M, tl.minimum(i + band.high + 1, band.end), 0)
    is_visible = (j >= tl.maximum(i + band.low, band.begin)) & (j < last)
    if mask.has_elements:
        is_visible = is_visible & element_mask(mask, coords, band.M, band.N)
    return is_visible


@triton.jit
def zero_hidden_keys(tile, is_visible, mask):
    """The tile of keys or values, with 0 for keys that the element mask hides from every query of
    this tile. `is_visible` is None if everything is visible."""
    if is_visible is not None and mask.has_elements:
        key_is_live = tl.max(is_visible.to(tl.int32), axis=0) > 0
        tile = tl.where(key_is_live[:, None], tile, 0.0)
    return tile


@triton.jit
def element_mask(mask, coords, M, N):
    """Element mask of position tests, dense mask, blocks and lists; False outside M x N"""
    i, j = coords.i, coords.j
    batch, head = tl.cast(coords.b, tl.int64), tl.cast(coords.h, tl.int64)
    is_visible = (i < M) & (j < N)
    inside = is_visible
    for test in tl.static_range(mask.tests):
        q_at = test * mask.q_test + batch * mask.q_b + head * mask.q_h + i
        k_at = test * mask.k_test + batch * mask.k_b + head * mask.k_h + j
        low = tl.load(mask.q_low + q_at, mask=i < M, other=0)
        high = tl.load(mask.q_high + q_at, mask=i < M, other=0)
        position = tl.load(mask.k_position + k_at, mask=j < N, other=0)
        # Unsigned: an interval with low > high wraps around.
        is_visible = is_visible & ((position - low).to(tl.uint64) <= (high - low).to(tl.uint64))
    if mask.dense is not None:
        by_b, by_h = batch * mask.dense_b, head * mask.dense_h
        by_i, by_j = i.to(tl.int64) * mask.dense_i, j.to(tl.int64) * mask.dense_j
        at = mask.dense + by_b + by_h + by_i + by_j
        is_visible = is_visible & (tl.load(at, mask=(i < M) & (j < mask.columns), other=0) != 0)
    if mask.blocks is not None:
        row, column = i // mask.block_size, j // mask.block_size
        by_h = head * mask.blocks_h
        by_i, by_j = row.to(tl.int64) * mask.blocks_i, column.to(tl.int64) * mask.blocks_j
        at = mask.blocks + by_h + by_i + by_j
        is_visible = is_visible & (tl.load(at, mask=inside, other=0) != 0)
    if mask.selected is not None:
        row = mask.selected + batch * mask.selected_b + head * mask.selected_h
        row += i.to(tl.int64) * mask.selected_count
        is_visible = is_visible & is_listed(row, j // mask.selected_size, inside, mask)
    return is_visible


@triton.jit
def is_listed(row, block, inside, mask):
    """True where the list at `row` (queries x 1), which ascends, has the number `block`"""
    # The last entry that is at most `block`, by halves: it is among the `low`-th and later ones.
    low = tl.zeros_like(inside.to(tl.int32))
    high = low + mask.selected_count
    for _ in tl.static_range(mask.selected_steps):
        middle = (low + high) // 2
        is_later = tl.load(row + middle, mask=inside & (middle < high), other=0) > block
        high = tl.where(is_later, middle, high)
        low = tl.where(is_later, low, middle)
    return tl.load(row + low, mask=inside & (low < mask.selected_count), other=-1) == block
