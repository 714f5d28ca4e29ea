"""Dropout masks by Philox2x32-7, in plain torch (docs/attention.md, section 7).

The bits are a pure function of (seed, b, h, i, j), identical in every backend. Queries i, i + 8 and
keys j, j + 8 of a block of 16 x 16 share a counter, which yields two 32-bit words of two 16-bit
halves: word (i >> 3) & 1, half (j >> 3) & 1. In a tensor-core fragment one lane holds all four
weights, whether its rows are queries or keys.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
"""Rows and columns of a block: parts of a call with dropout begin at a multiple."""
_MULTIPLIER = 0xD256D193
_WEYL = 0x9E3779B9
_LOW = 0xFFFFFFFF
_ROUNDS = 7  # the smallest number that passes all of BigCrush


def keep_threshold(dropout_p: float) -> int:
    """Returns the threshold: a weight is kept if its 16-bit half is at least this value."""
    return min(int(dropout_p * 2**16 + 0.5), 2**16 - 1)


def keep_factor(dropout_p: float) -> float:
    """Returns the factor of kept weights: 1 / the probability that `keep_threshold` keeps one.

    0 for dropout_p = 1, which drops every weight.
    """
    return 0.0 if dropout_p == 1.0 else 2**16 / (2**16 - keep_threshold(dropout_p))


def keep_mask(
    seed: Tensor,
    B: int,
    H: int,
    M: int,
    N: int,
    dropout_p: float,
    first: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> Tensor:
    """Returns the dropout mask, bool (B, H, M, N); True = kept.

    `seed` is an int64 scalar tensor; `first` has the indices (b, h, i, j) of element (0, 0, 0, 0).
    """
    device = seed.device
    b, h, i, j = (
        start + torch.arange(count, device=device).view(shape)
        for start, count, shape in zip(
            first, (B, H, M, N), ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,)), strict=True
        )
    )
    key, start = philox(seed & _LOW, h, b)
    key = key ^ ((seed >> 32) & _LOW)
    words = philox(key, (start + _counter(i)) & _LOW, _counter(j))
    word = torch.where((i & 8) != 0, words[1], words[0])
    half = torch.where((j & 8) != 0, word >> 16, word & 0xFFFF)
    return half >= keep_threshold(dropout_p)


def _counter(n: Tensor) -> Tensor:
    """Returns the counters of queries or keys: n and n + 8 of a block share one."""
    return (n >> 4) * 8 + (n & 7)


def philox(key: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
    """Applies seven rounds of Philox2x32 to a counter. Words are int64 tensors below 2^32."""
    for _ in range(_ROUNDS):
        high, low = _multiply(x0, _MULTIPLIER)
        x0, x1 = high ^ key ^ x1, low
        key = (key + _WEYL) & _LOW
    return x0, x1


def _multiply(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """Returns the high and low word of a 32 x 32-bit product. `a` is split to avoid overflow."""
    low = (a & 0xFFFF) * constant
    high = (a >> 16) * constant + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
