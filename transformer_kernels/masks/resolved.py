"""A mask resolved against sizes: at most one constraint of each kind, as kernels read it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels.masks.constraints import BlockSparse, Dense, KeyRange, Segments, Window
from transformer_kernels.masks.mask import Mask

UNBOUNDED = 1 << 62
"""A diagonal further out than any index; index + UNBOUNDED still fits in 64 bits."""

_Ids = tuple[Tensor, Tensor]


class ResolvedMask(NamedTuple):
    """Visible: i + diagonal_low <= j <= i + diagonal_high, and whatever else is not None."""

    diagonal_low: int = -UNBOUNDED
    diagonal_high: int = UNBOUNDED
    key_start: Tensor | None = None
    """(B,) int64: start <= j"""
    key_end: Tensor | None = None
    """(B,) int64: j < end"""
    q_segments: Tensor | None = None
    """(B, M) int64: equal to k_segments[b, j]"""
    k_segments: Tensor | None = None
    """(B, N) int64"""
    dense: Tensor | None = None
    """bool, each dimension 1 or that of (B, H, M, N)"""
    layout: Tensor | None = None
    """bool (H or 1, ceil(M / block_size), ceil(N / block_size))"""
    block_size: int = 0


def resolve(mask: Mask | None, B: int, H: int, M: int, N: int) -> ResolvedMask:
    """Checks the mask against the sizes and merges constraints of the same kind."""
    low, high = -UNBOUNDED, UNBOUNDED
    start: Tensor | None = None
    end: Tensor | None = None
    ids: _Ids | None = None
    shown: Tensor | None = None
    layout: Tensor | None = None
    size = 0
    for one in mask.constraints if mask is not None else ():
        one.check(B, H, M, N)
        match one:
            case Window():
                this_low, this_high = one.diagonals(M, N)
                low = low if this_low is None else max(low, this_low)
                high = high if this_high is None else min(high, this_high)
            case KeyRange():
                start = _merge_bounds(torch.maximum, start, one.start)
                end = _merge_bounds(torch.minimum, end, one.end)
            case Segments():
                these = one.q_ids.long(), one.k_ids.long()
                ids = these if ids is None else _pair_ids(ids, these)
            case Dense():
                shown = one.shown if shown is None else shown & one.shown
            case BlockSparse():
                layout, size = _merge_blocks(layout, size, one, M, N)
    q_ids, k_ids = (None, None) if ids is None else ids
    return ResolvedMask(low, high, start, end, q_ids, k_ids, shown, layout, size)


def _merge_bounds(
    merge: Callable[[Tensor, Tensor], Tensor], bound: Tensor | None, other: Tensor | None
) -> Tensor | None:
    if other is None:
        return bound
    return other.long() if bound is None else merge(bound, other.long())


def _pair_ids(a: _Ids, b: _Ids) -> _Ids:
    """Ids that are equal exactly where both pairs' ids are.

    Each is first replaced by its place among all of them in order, for ids may be of any size. The
    shapes depend on no number, so that no device is waited for, and CUDA graphs can hold it.
    """
    M = a[0].shape[1]
    both = [torch.cat(pair, dim=1) for pair in (a, b)]
    places = [torch.searchsorted(ids.flatten().sort().values, ids) for ids in both]
    joined = places[0] * places[1].numel() + places[1]
    return joined[:, :M], joined[:, M:]


def _merge_blocks(
    layout: Tensor | None, size: int, other: BlockSparse, M: int, N: int
) -> tuple[Tensor, int]:
    if layout is None:
        return other.layout, other.block_size
    common = math.gcd(size, other.block_size)
    finer = _finer(layout, size, common, M, N)
    return finer & _finer(other.layout, other.block_size, common, M, N), common


def _finer(layout: Tensor, size: int, common: int, M: int, N: int) -> Tensor:
    """The blocks of `size` as blocks of `common`, which divides it."""
    if size == common:
        return layout
    rows, columns = -(-M // common), -(-N // common)
    return BlockSparse(layout, size // common).visible(rows, columns, layout.device)[0]
