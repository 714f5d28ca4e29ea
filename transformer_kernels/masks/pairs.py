"""Numbers of visible pairs, without a mask of M x N."""

from __future__ import annotations

import torch

from .resolved import ResolvedMask

_ROWS = 1024
"""Rows of an element mask that are counted at once."""


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
