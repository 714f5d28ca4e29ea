"""Floating-point operations of a call: those of its matrix products, two for a multiply-add.

The visible pairs are counted without a mask of M x N.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from ..common.argument_checks import values_are_readable
from ..masks.resolved import ResolvedMask
from .types import Problem

_Number = TypeVar("_Number", int, float)
_ROWS = 1024
"""Rows of an element mask that are counted at once."""


def forward_operations(pairs: _Number, D: int, D_v: int) -> _Number:
    """Operations of q k^T and p v, for the visible pairs of all batch entries and query heads."""
    return 2 * pairs * (D + D_v)


def backward_operations(pairs: _Number, D: int, D_v: int) -> _Number:
    """Operations of q k^T again, do v^T, p^T do, ds k and ds^T q."""
    return 2 * pairs * (3 * D + 2 * D_v)


def linear_forward_operations(queries: int, keys: int, D: int, D_v: int) -> int:
    """Operations of the recurrence of linear attention: product and update of the state.

    `queries` and `keys` are rows of all batch entries and heads.
    """
    return 2 * (queries + keys) * D * D_v


def linear_backward_operations(queries: int, keys: int, D: int, D_v: int) -> int:
    """Operations of the state again, and dS; do S^T, v dS^T and phi(k) dS."""
    return 2 * (2 * queries + 3 * keys) * D * D_v


def delta_forward_operations(tokens: int, D: int, D_v: int) -> int:
    """Operations of the recurrence of the delta rule: S^T k, k u^T and S^T q.

    `tokens` are rows of v of all batch entries and heads.
    """
    return 2 * 3 * tokens * D * D_v


def delta_backward_operations(tokens: int, D: int, D_v: int) -> int:
    """Operations of the state again; q do^T, S do, dS^T k, dS u, S dr and k dr^T."""
    return 2 * 8 * tokens * D * D_v


def visible_pairs(problem: Problem) -> int:
    """Returns the number of visible pairs of all batch entries and query heads.

    Values of tensors are read on CPUs only. Elsewhere constraints with tensors are taken to hide
    nothing, and sequences to have their longest lengths.
    """
    shape, mask = problem.shape, problem.mask
    if any(isinstance(x, Tensor) and not values_are_readable(x) for x in mask):
        mask = ResolvedMask(mask.diagonal_low, mask.diagonal_high, mask.bottom_right)
    if mask.has_element_mask:
        return element_pairs(mask, shape.B, shape.H_q, shape.M, shape.N)
    starts = _values(mask.key_start, [0] * shape.B)
    ends = _values(mask.key_end, [shape.N] * shape.B)
    pairs = 0
    for (M, N), start, end in zip(_lengths(problem), starts, ends, strict=True):
        start, end = max(start, 0), min(end, N)
        shift = (N - M if mask.bottom_right else 0) - start
        low, high = mask.diagonal_low + shift, mask.diagonal_high + shift
        pairs += window_pairs(low, high, M, max(end - start, 0))
    return shape.H_q * pairs


def _lengths(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yields the numbers of queries and keys of each sequence."""
    shape, layout = problem.shape, problem.layout
    queries, keys = [shape.M] * shape.B, [shape.N] * shape.B
    if layout.cu_seqlens_q is not None and layout.cu_seqlens_k is not None:
        queries = _values(layout.cu_seqlens_q.diff(), queries)
        keys = _values(layout.cu_seqlens_k.diff(), keys)
    return zip(queries, _values(layout.cache_seqlens, keys), strict=True)


def _values(x: Tensor | None, otherwise: list[int]) -> list[int]:
    if x is None or not values_are_readable(x):
        return otherwise
    values: list[int] = x.tolist()
    return values


def window_pairs(low: int, high: int, M: int, N: int) -> int:
    """Returns the pairs (i, j) of M x N with i + low <= j <= i + high."""
    return max(0, _pairs_up_to(high, M, N) - _pairs_up_to(low - 1, M, N))


def element_pairs(mask: ResolvedMask, B: int, H: int, M: int, N: int) -> int:
    """Returns the visible pairs of all batch entries and heads, of a dense call's element mask.

    Reads the values of its tensors, some rows at a time.
    """
    pairs = 0
    for rows in torch.arange(M).split(_ROWS):
        visible = mask.of_rows(rows, M, N).visible(len(rows), N, rows.device)
        assert visible is not None
        pairs += int(visible.count_nonzero()) * B // visible.shape[0] * H // visible.shape[1]
    return pairs


def _pairs_up_to(diagonal: int, M: int, N: int) -> int:
    """Pairs (i, j) of M x N with j - i <= diagonal: rows have diagonal + 1, diagonal + 2, ...
    diagonal + M of them, but none less than 0 and none more than N."""

    def total(last: int) -> int:
        """Sum of min(t, N) for t from 1 to `last`."""
        last = max(last, 0)
        small = min(last, N)
        return small * (small + 1) // 2 + (last - small) * N

    return total(diagonal + M) - total(diagonal)
