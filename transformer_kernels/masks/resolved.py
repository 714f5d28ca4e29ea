"""Resolved masks: the form that kernels read, with at most one constraint of each kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.masks.constraints import (
    UNBOUNDED,
    Align,
    BlockSparse,
    Constraint,
    Dense,
    KeyRange,
    Segments,
    Window,
)
from transformer_kernels.masks.mask import Mask
from transformer_kernels.storage import check_storage

BLOCK_MASK_SIZE = 64
"""Queries and keys per block-mask entry; equals kBlockMaskSize in csrc/common/mask.h."""

_Ids = tuple[Tensor, Tensor]


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
    key_start: Annotated[Tensor | None, "(B)", "dense"] = None
    """int64: key_start[b] <= j"""
    key_end: Annotated[Tensor | None, "(B)", "dense"] = None
    """int64: j < key_end[b]"""
    q_segments: Annotated[Tensor | None, "(B, M)", "dense"] = None
    """int64: q_segments[b, i] == k_segments[b, j]"""
    k_segments: Annotated[Tensor | None, "(B, N)", "dense"] = None
    dense: Annotated[Tensor | None, "(1|B, 1|H_q, 1|M, 1|N)", "dense"] = None
    """bool"""
    layout: Annotated[Tensor | None, "(1|H_q, rows, columns)", "dense"] = None
    """bool: layout[h, i // block_size, j // block_size]"""
    block_size: Annotated[int, "", "dense"] = 0

    @property
    def has_element_mask(self) -> bool:
        """True if the mask has segments, a dense mask or a layout, which need a block mask."""
        return not (self.q_segments is None and self.dense is None and self.layout is None)

    def block_mask_shape(self, M: int, N: int) -> tuple[int, ...]:
        """Returns (B or 1, H_q or 1, row blocks, column blocks); (0,) without an element mask."""
        if not self.has_element_mask:
            return (0,)
        B = 1 if self.q_segments is None else self.q_segments.shape[0]
        H = 1
        if self.dense is not None:
            B, H = max(B, self.dense.shape[0]), self.dense.shape[1]
        if self.layout is not None:
            H = max(H, self.layout.shape[0])
        return B, H, -(-M // BLOCK_MASK_SIZE), -(-N // BLOCK_MASK_SIZE)

    def visible(self, M: int, N: int, device: torch.device) -> Tensor | None:
        """Returns bool (1 or B, 1 or H_q, M, N), True = visible; None if everything is visible."""
        visible: Tensor | None = None
        for constraint in self._constraints():
            one = constraint.visible(M, N, device)
            visible = one if visible is None else visible & one
        return None if visible is None else visible.expand(-1, -1, M, N)

    def _constraints(self) -> Iterator[Constraint]:
        if self.diagonal_low != -UNBOUNDED or self.diagonal_high != UNBOUNDED:
            align: Align = "bottom_right" if self.bottom_right else "top_left"
            yield Window(-self.diagonal_low, self.diagonal_high, align)
        if self.key_end is not None:
            yield KeyRange(self.key_start, self.key_end)
        if self.q_segments is not None and self.k_segments is not None:
            yield Segments(self.q_segments, self.k_segments)
        if self.dense is not None:
            yield Dense(self.dense)
        if self.layout is not None:
            yield BlockSparse(self.layout, self.block_size)


ALL_VISIBLE = ResolvedMask()


def resolve(mask: Mask, B: int, H: int, M: int, N: int, align: Align = "top_left") -> ResolvedMask:
    """Checks the mask against the sizes and merges constraints of the same kind.

    The origin of the diagonals is the `align` of the windows. It is top-left if they differ, and
    the argument `align` if there are no windows.

    Raises ValueError if a tensor of the mask does not fit the sizes.
    """
    windows: list[Window] = []
    start: Tensor | None = None
    end: Tensor | None = None
    ids: _Ids | None = None
    dense: Tensor | None = None
    layout: Tensor | None = None
    size = 0
    for one in mask.constraints:
        one.check(B, H, M, N)
        match one:
            case Window():
                windows.append(one)
            case KeyRange():
                if one.start is not None:
                    start = _merge(torch.maximum, start, _int64(one.start))
                end = _merge(torch.minimum, end, _int64(one.end))
            case Segments():
                these = _int64(one.q_ids), _int64(one.k_ids)
                ids = these if ids is None else _pair_ids(ids, these)
            case Dense():
                dense = _merge(torch.bitwise_and, dense, one.attn_mask)
            case BlockSparse():
                layout, size = _merge_blocks(layout, size, one, M, N)
    if windows:
        align = windows[0].align
        if len(windows) > 1 and any(window.align != align for window in windows):
            align = "top_left"
    low, high = _intersection(windows, align, N - M)
    q_ids, k_ids = (None, None) if ids is None else ids
    bottom_right = align == "bottom_right"
    return ResolvedMask(low, high, bottom_right, start, end, q_ids, k_ids, dense, layout, size)


def resolve_windows(mask: Mask | None, align: Align) -> ResolvedMask:
    """Merges windows of one `align`, for sequences of different sizes."""
    low, high = _intersection(_windows(mask), align, 0)
    return ResolvedMask(low, high, align == "bottom_right")


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


def _pair_ids(a: _Ids, b: _Ids) -> _Ids:
    """Merges two pairs of ids into one: the results are equal exactly where both inputs are.

    Ids may be any integers, so each one is first replaced by its rank among all ids. All shapes are
    independent of the values: no device synchronisation, and CUDA graphs can capture it.
    """
    _check_memory(*a, *b)
    M = a[0].shape[1]
    both = [torch.cat(pair, dim=1) for pair in (a, b)]
    ranks = [torch.searchsorted(ids.flatten().sort().values, ids) for ids in both]
    joined = ranks[0] * ranks[1].numel() + ranks[1]
    return joined[:, :M], joined[:, M:]


def _merge_blocks(
    layout: Tensor | None, size: int, other: BlockSparse, M: int, N: int
) -> tuple[Tensor, int]:
    if layout is None:
        return other.layout, other.block_size
    _check_memory(layout, other.layout)
    common = math.gcd(size, other.block_size)
    finer = _finer(layout, size, common, M, N)
    return finer & _finer(other.layout, other.block_size, common, M, N), common


def _finer(layout: Tensor, size: int, common: int, M: int, N: int) -> Tensor:
    """Refines a layout of block size `size` to block size `common`, a divisor of it."""
    if size == common:
        return layout
    rows, columns = -(-M // common), -(-N // common)
    return BlockSparse(layout, size // common).visible(rows, columns, layout.device)[0]
