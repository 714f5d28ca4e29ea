"""Resolved masks: the form that kernels read, with at most one constraint of each kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels.masks.constraints import (
    UNBOUNDED,
    BlockSparse,
    Dense,
    KeyRange,
    Segments,
    Window,
)
from transformer_kernels.masks.mask import Mask
from transformer_kernels.storage import check_storage

_Ids = tuple[Tensor, Tensor]


class ResolvedMask(NamedTuple):
    """Mask resolved against the sizes of a call.

    A pair is visible if i + diagonal_low <= j <= i + diagonal_high and every constraint below that
    is not None holds. Diagonals that hide every pair are UNBOUNDED and -UNBOUNDED: the keys of all
    rows together are then an empty interval too.
    """

    diagonal_low: int = -UNBOUNDED
    diagonal_high: int = UNBOUNDED
    key_start: Tensor | None = None
    """(B,) int64: key_start[b] <= j"""
    key_end: Tensor | None = None
    """(B,) int64: j < key_end[b]"""
    q_segments: Tensor | None = None
    """(B, M) int64: q_segments[b, i] == k_segments[b, j]"""
    k_segments: Tensor | None = None
    """(B, N) int64"""
    dense: Tensor | None = None
    """bool, each dimension 1 or that of (B, H, M, N)"""
    layout: Tensor | None = None
    """bool (H or 1, ceil(M / block_size), ceil(N / block_size))"""
    block_size: int = 0


def resolve(mask: Mask | None, B: int, H: int, M: int, N: int) -> ResolvedMask:
    """Checks the mask against the sizes and merges constraints of the same kind.

    Raises ValueError if a tensor of the mask does not fit the sizes.
    """
    low, high = -UNBOUNDED, UNBOUNDED
    start: Tensor | None = None
    end: Tensor | None = None
    ids: _Ids | None = None
    dense: Tensor | None = None
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
    if low > high:
        low, high = UNBOUNDED, -UNBOUNDED
    q_ids, k_ids = (None, None) if ids is None else ids
    return ResolvedMask(low, high, start, end, q_ids, k_ids, dense, layout, size)


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
