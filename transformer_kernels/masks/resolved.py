"""Resolved masks: the form that kernels read, with at most one constraint of each kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from ..common.storage import check_storage
from .constraints import (
    UNBOUNDED,
    Align,
    BlockSparse,
    Constraint,
    Dense,
    Intervals,
    KeyRange,
    Positions,
    PositionTest,
    Segments,
    Window,
)
from .mask import Mask
from .selected import Selected, intersection

BLOCK_MASK_SIZE = 64
"""Queries and keys per block-mask entry; equals kBlockMaskSize in csrc/common/mask.h."""


class ResolvedMask(NamedTuple):
    """Mask resolved against the sizes of a call. Annotations: see `problem.fields`.

    A pair is visible if i + d + diagonal_low <= j <= i + d + diagonal_high and every constraint
    below that is not None holds. Diagonals that hide every pair are UNBOUNDED and -UNBOUNDED: the
    keys of all rows together are then an empty interval too.
    """

    diagonal_low: int = -UNBOUNDED
    diagonal_high: int = UNBOUNDED
    bottom_right: bool = False
    """Origin of the diagonals and of ALiBi: d = 0, or if True d = N - M of each sequence."""
    key_start: Annotated[Tensor | None, "(B)", "dense cache"] = None
    """int64: key_start[b] <= j"""
    key_end: Annotated[Tensor | None, "(B)", "dense cache"] = None
    """int64: j < key_end[b]"""
    q_low: Annotated[Tensor | None, "(tests, 1|B, 1|H_q, M)", "dense"] = None
    """int64: segments and positions, one test each. For all n, q_low[n, b, h, i] <=
    k_position[n, b, h, j] <= q_high[n, b, h, i], on the circle of 64-bit integers."""
    q_high: Annotated[Tensor | None, "(tests, 1|B, 1|H_q, M)", "dense"] = None
    k_position: Annotated[Tensor | None, "(tests, 1|B, 1|H_q, N)", "dense"] = None
    dense: Annotated[Tensor | None, "(1|B, 1|H_q, 1|M, 1|N)", "dense"] = None
    """bool"""
    blocks: Annotated[Tensor | None, "(1|H_q, rows, columns)", "dense"] = None
    """bool: blocks[h, i // block_size, j // block_size]"""
    block_size: Annotated[int, "", "dense"] = 0
    selected: Annotated[Tensor | None, "(1|B, 1|H_q, M, count)", "dense"] = None
    """int32, ascending: j // selected_size is in selected[b, h, i]"""
    selected_size: Annotated[int, "", "dense"] = 0

    @property
    def has_element_mask(self) -> bool:
        """True if position tests, a dense mask, blocks or lists hide pairs. These need a block
        mask."""
        return not (
            self.q_low is None
            and self.dense is None
            and self.blocks is None
            and self.selected is None
        )

    def block_mask_shape(self, M: int, N: int) -> tuple[int, ...]:
        """Returns (B or 1, H_q or 1, row blocks, column blocks); (0,) without an element mask."""
        if not self.has_element_mask:
            return (0,)
        extents = [(1, 1)]
        if self.q_low is not None and self.k_position is not None:
            extents += [(x.shape[1], x.shape[2]) for x in (self.q_low, self.k_position)]
        if self.dense is not None:
            extents.append((self.dense.shape[0], self.dense.shape[1]))
        if self.blocks is not None:
            extents.append((1, self.blocks.shape[0]))
        if self.selected is not None:
            extents.append((self.selected.shape[0], self.selected.shape[1]))
        B, H = (
            next((size for size in sizes if size != 1), 1) for sizes in zip(*extents, strict=True)
        )
        return B, H, -(-M // BLOCK_MASK_SIZE), -(-N // BLOCK_MASK_SIZE)

    def visible(self, M: int, N: int, device: torch.device) -> Tensor | None:
        """Returns bool (1 or B, 1 or H_q, M, N), True = visible; None if everything is visible."""
        visible: Tensor | None = None
        masks = [constraint.visible(M, N, device) for constraint in self._constraints()]
        for one in masks + [test.visible() for test in self._tests()]:
            visible = one if visible is None else visible & one
        return None if visible is None else visible.expand(-1, -1, M, N)

    def of_rows(self, rows: Tensor, M: int, N: int) -> ResolvedMask:
        """Returns the mask of some of M queries, by their indices (R,), with R x N memory."""
        columns = torch.arange(N, device=rows.device)
        offset = columns - rows[:, None] - (N - M if self.bottom_right else 0)
        visible = ((self.diagonal_low <= offset) & (offset <= self.diagonal_high))[None, None]
        if self.dense is not None:
            dense = self.dense
            visible = visible & (dense if dense.shape[2] == 1 else dense.index_select(2, rows))
        if self.blocks is not None:
            blocks = self.blocks.index_select(1, rows // self.block_size)
            visible = visible & blocks.index_select(2, columns // self.block_size)
        q_low, q_high = (
            None if x is None else x.index_select(3, rows) for x in (self.q_low, self.q_high)
        )
        return ResolvedMask(
            key_start=self.key_start, key_end=self.key_end, dense=visible,
            q_low=q_low, q_high=q_high, k_position=self.k_position,
            selected=None if self.selected is None else self.selected.index_select(2, rows),
            selected_size=self.selected_size,
        )  # fmt: skip

    def _constraints(self) -> Iterator[Constraint]:
        if self.diagonal_low != -UNBOUNDED or self.diagonal_high != UNBOUNDED:
            align: Align = "bottom_right" if self.bottom_right else "top_left"
            yield Window(-self.diagonal_low, self.diagonal_high, align)
        if self.key_end is not None:
            yield KeyRange(self.key_start, self.key_end)
        if self.dense is not None:
            yield Dense(self.dense)
        if self.blocks is not None:
            yield BlockSparse(self.blocks, self.block_size)
        if self.selected is not None:
            yield Selected(self.selected, self.selected_size)

    def _tests(self) -> Iterator[PositionTest]:
        if self.q_low is not None and self.q_high is not None and self.k_position is not None:
            for one in zip(self.q_low, self.q_high, self.k_position, strict=True):
                yield PositionTest(*one)


ALL_VISIBLE = ResolvedMask()


def resolve(mask: Mask, B: int, H: int, M: int, N: int, align: Align = "top_left") -> ResolvedMask:
    """Checks the mask against the sizes and merges constraints of the same kind.

    The origin of the diagonals is the `align` of the windows. It is top-left if they differ, and
    the argument `align` if there are no windows.

    Raises ValueError if a tensor of the mask does not fit the sizes.
    """
    windows: list[Window] = []
    ranges: list[KeyRange] = []
    others: list[Constraint] = []
    for one in mask.constraints:
        one.check(B, H, M, N)
        if isinstance(one, Window):
            windows.append(one)
        elif isinstance(one, KeyRange):
            ranges.append(one)
        else:
            others.append(one)
    if windows:
        align = windows[0].align
        if len(windows) > 1 and any(window.align != align for window in windows):
            align = "top_left"
    low, high = _intersection(windows, align, N - M)
    start, end = _intersected(ranges)
    elements = _elements(others, M, N) if others else ()
    return ResolvedMask(low, high, align == "bottom_right", start, end, *elements)


def _elements(others: Sequence[Constraint], M: int, N: int) -> tuple[Any, ...]:
    """Merges constraints other than windows and key ranges; returns the last fields."""
    tests: list[PositionTest] = []
    lists: Selected | None = None
    dense: Tensor | None = None
    blocks: Tensor | None = None
    size = 0
    for one in others:
        match one:
            case Segments() | Positions() | Intervals():
                kind = type(one).__name__
                check_storage((f"the mask's {kind}.{x}", y) for x, y in one.tensors().items())
                tests.append(one.test())
            case Dense():
                dense = _merge(torch.bitwise_and, dense, one.attn_mask)
            case BlockSparse():
                blocks, size = _merge_blocks(blocks, size, one, M, N)
            case Selected():
                lists = one if lists is None else intersection(lists, one)
    q_low = q_high = k_position = None
    if tests:
        q_low = _stack([test.low for test in tests])
        q_high = _stack([test.high for test in tests])
        k_position = _stack([test.position for test in tests])
    selected = (None, 0) if lists is None else (lists.indices, lists.block_size)
    return q_low, q_high, k_position, dense, blocks, size, *selected


def resolve_windows(mask: Mask | None, align: Align) -> ResolvedMask:
    """Merges windows of one `align`, and key ranges, for sequences of different sizes."""
    low, high = _intersection(_windows(mask), align, 0)
    constraints = () if mask is None else mask.constraints
    start, end = _intersected([one for one in constraints if isinstance(one, KeyRange)])
    return ResolvedMask(low, high, align == "bottom_right", start, end)


def bounded_aligns(mask: Mask | None) -> set[Align]:
    """Returns the origins of the windows that are bounded on a side."""
    return {window.align for window in _windows(mask) if window.is_bounded}


def _windows(mask: Mask | None) -> list[Window]:
    return [] if mask is None else [one for one in mask.constraints if isinstance(one, Window)]


def _intersection(windows: Sequence[Window], align: Align, shift: int) -> tuple[int, int]:
    """Diagonals from the origin `align`. `shift` is that of windows with another origin."""
    low, high = -UNBOUNDED, UNBOUNDED
    for window in windows:
        this_low, this_high = window.diagonals(0 if window.align == align else shift)
        low = low if this_low is None else max(low, this_low)
        high = high if this_high is None else min(high, this_high)
    return (low, high) if low <= high else (UNBOUNDED, -UNBOUNDED)


def _intersected(ranges: Sequence[KeyRange]) -> tuple[Tensor | None, Tensor | None]:
    """Intersects key ranges; returns (start, end), None where no range has a bound."""
    start: Tensor | None = None
    end: Tensor | None = None
    for one in ranges:
        if one.start is not None:
            start = _merge(torch.maximum, start, _int64(one.start))
        end = _merge(torch.minimum, end, _int64(one.end))
    return start, end


def _merge(merge: Callable[[Tensor, Tensor], Tensor], x: Tensor | None, y: Tensor) -> Tensor:
    if x is None:
        return y
    _check_memory(x, y)
    return merge(x, y)


def _int64(x: Tensor) -> Tensor:
    if x.dtype is not torch.int64:
        _check_memory(x)
    return x.long()


def _check_memory(*tensors: Tensor) -> None:
    """Raises ValueError if the storage of a tensor is freed. Called before torch reads it."""
    check_storage(("a tensor of the mask", x) for x in tensors)


def _stack(tensors: list[Tensor]) -> Tensor:
    """Stacks tensors that broadcast to each other; a single one is not copied."""
    if len(tensors) == 1:
        return tensors[0][None]
    return torch.stack(torch.broadcast_tensors(*tensors))


def _merge_blocks(
    blocks: Tensor | None, size: int, other: BlockSparse, M: int, N: int
) -> tuple[Tensor, int]:
    if blocks is None:
        return other.blocks, other.block_size
    _check_memory(blocks, other.blocks)
    common = math.gcd(size, other.block_size)
    finer = _finer(blocks, size, common, M, N)
    return finer & _finer(other.blocks, other.block_size, common, M, N), common


def _finer(blocks: Tensor, size: int, common: int, M: int, N: int) -> Tensor:
    """Refines blocks of size `size` to size `common`, a divisor of it."""
    if size == common:
        return blocks
    rows, columns = -(-M // common), -(-N // common)
    return BlockSparse(blocks, size // common).visible(rows, columns, blocks.device)[0]
