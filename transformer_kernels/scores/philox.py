"""Dropout masks by Philox4x32-7, in plain torch (docs/attention.md, section 7).

The bits are a pure function of (seed, b, h, i, j), identical in every backend. One counter yields
four 32-bit words of two 16-bit halves. Column j uses half (j >> 3) & 1 of word (j >> 4) & 3 of
counter (j >> 6) * 8 + (j & 7). So 64 neighbouring columns need 8 counters, and both a SIMD register
and a tensor-core fragment use every half that they compute.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
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
        start + torch.arange(count, device=device)
        for start, count in zip(first, (B, H, M, N), strict=True)
    )
    shape = (B, H, M, N)
    counter = [
        ((j >> 6) * 8 + (j & 7)).expand(shape),
        i[:, None].expand(shape),
        h[:, None, None].expand(shape),
        b[:, None, None, None].expand(shape),
    ]
    words = torch.stack(philox(seed, counter))
    chosen = words.gather(0, ((j >> 4) & 3).expand(shape)[None])[0]
    half = (chosen >> ((j >> 3 & 1) * 16)) & 0xFFFF
    return half >= keep_threshold(dropout_p)


def philox(seed: Tensor, counter: list[Tensor]) -> list[Tensor]:
    """Applies seven rounds of Philox4x32 to four int64 tensors that hold 32-bit words."""
    x0, x1, x2, x3 = counter
    key0, key1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(x0, _MULTIPLIERS[0])
        high1, low1 = _multiply(x2, _MULTIPLIERS[1])
        x0, x1, x2, x3 = high1 ^ x1 ^ key0, low1, high0 ^ x3 ^ key1, low0
        key0, key1 = (key0 + _WEYL[0]) & _LOW, (key1 + _WEYL[1]) & _LOW
    return [x0, x1, x2, x3]


def _multiply(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """Returns the high and low word of a 32 x 32-bit product. `a` is split to avoid overflow."""
    low = (a & 0xFFFF) * constant
    high = (a >> 16) * constant + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
