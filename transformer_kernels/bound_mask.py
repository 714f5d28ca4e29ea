"""A mask bound to sizes: at most one constraint of each kind is left, in the form kernels read."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels.constraints import BlockSparse, Dense, KeyRange, Segments, Window
from transformer_kernels.mask import Mask

UNBOUNDED = 1 << 62
"""A diagonal further out than any index; index + UNBOUNDED still fits in 64 bits."""


class BoundMask(NamedTuple):
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


def bind(mask: Mask | None, B: int, H: int, M: int, N: int) -> BoundMask:
    """Checks the mask against the sizes and merges constraints of the same kind."""
    if mask is None:
        return BoundMask()
    mask.check(B, H, M, N)
    windows = [c for c in mask.constraints if isinstance(c, Window)]
    ranges = [c for c in mask.constraints if isinstance(c, KeyRange)]
    segments = [c for c in mask.constraints if isinstance(c, Segments)]
    dense = [c.shown for c in mask.constraints if isinstance(c, Dense)]
    blocks = [c for c in mask.constraints if isinstance(c, BlockSparse)]

    low, high = _merge_windows(windows, M, N)
    key_start, key_end = _merge_ranges(ranges)
    q_segments, k_segments = _merge_segments(segments)
    layout, block_size = _merge_blocks(blocks, M, N)
    shown: Tensor | None = None
    for one in dense:
        shown = one if shown is None else shown & one
    return BoundMask(
        low, high, key_start, key_end, q_segments, k_segments, shown, layout, block_size
    )


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _merge_windows(windows: list[Window], M: int, N: int) -> tuple[int, int]:
    low, high = -UNBOUNDED, UNBOUNDED
    for window in windows:
        this_low, this_high = window.diagonals(M, N)
        low = low if this_low is None else max(low, this_low)
        high = high if this_high is None else min(high, this_high)
    return low, high


def _merge_ranges(ranges: list[KeyRange]) -> tuple[Tensor | None, Tensor | None]:
    start: Tensor | None = None
    end: Tensor | None = None
    for one in ranges:
        one_end = one.end.long()
        end = one_end if end is None else torch.minimum(end, one_end)
        if one.start is not None:
            one_start = one.start.long()
            start = one_start if start is None else torch.maximum(start, one_start)
    return start, end


def _merge_segments(segments: list[Segments]) -> tuple[Tensor | None, Tensor | None]:
    if not segments:
        return None, None
    q_ids, k_ids = segments[0].q_ids.long(), segments[0].k_ids.long()
    for other in segments[1:]:
        q_ids, k_ids = _pair_ids((q_ids, k_ids), (other.q_ids.long(), other.k_ids.long()))
    return q_ids, k_ids


def _pair_ids(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Ids that are equal exactly where both pairs' ids are.

    Each is first replaced by its place among all of them in order, for ids may be of any size. The
    shapes depend on no number, so that no device is waited for, and CUDA graphs can hold it.
    """
    M = a[0].shape[1]
    both = [torch.cat(pair, dim=1) for pair in (a, b)]
    places = [torch.searchsorted(ids.flatten().sort().values, ids) for ids in both]
    joined = places[0] * places[1].numel() + places[1]
    return joined[:, :M], joined[:, M:]


def _merge_blocks(blocks: list[BlockSparse], M: int, N: int) -> tuple[Tensor | None, int]:
    if not blocks:
        return None, 0
    size = math.gcd(*(block.block_size for block in blocks))
    rows, columns = _ceil_div(M, size), _ceil_div(N, size)
    layout: Tensor | None = None
    for block in blocks:
        fine = block.layout
        if block.block_size > size:
            finer = BlockSparse(block.layout, block.block_size // size)
            fine = finer.visible(rows, columns, fine.device)[0]
        layout = fine if layout is None else layout & fine
    return layout, size
