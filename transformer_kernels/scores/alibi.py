"""Biases that kernels compute for themselves; a plain tensor is a dense bias."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_kernels.masks.constraints import Align


@dataclass(frozen=True, eq=False)
class Alibi:
    """bias[b, h, i, j] = -slopes[h] * |i + d - j|, d = 0 ("top_left") or N - M ("bottom_right")."""

    slopes: Tensor
    align: Align = "top_left"

    def dense(self, M: int, N: int) -> Tensor:
        """The same bias as a dense tensor (1, H, M, N)."""
        d = N - M if self.align == "bottom_right" else 0
        i = torch.arange(M, device=self.slopes.device)[:, None]
        j = torch.arange(N, device=self.slopes.device)[None, :]
        distance = (i + d - j).abs().to(self.slopes.dtype)
        return -self.slopes[None, :, None, None] * distance


def alibi(slopes: Tensor, *, align: Align = "top_left") -> Alibi:
    """ALiBi: a penalty that grows linearly with distance, computed inside the kernel.

    `slopes` is (H_q,), floating point. Under a causal mask it equals slope * (j - i) up to a
    constant a row, which the softmax does not see. Source: Press et al. 2022, arXiv:2108.12409.
    """
    if not isinstance(slopes, Tensor) or not slopes.dtype.is_floating_point:
        raise TypeError(f"slopes must be a floating-point tensor, got {slopes!r}")
    if slopes.dim() != 1:
        raise ValueError(f"slopes must be (H_q,), got shape {tuple(slopes.shape)}")
    if align not in ("top_left", "bottom_right"):
        raise ValueError(f"align must be 'top_left' or 'bottom_right', got {align!r}")
    return Alibi(slopes, align)


def alibi_slopes(heads: int) -> Tensor:
    """The paper's slopes, float32 (heads,): 2^(-8 h / heads) for h = 1..heads.

    For a head count that is not a power of two, the slopes of the power below it come first, then
    every other slope of the power above (as in the paper's own code).
    """
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(f"heads must be a positive int, got {heads!r}")
    power = 1 << int(math.log2(heads))

    def geometric(count: int) -> Tensor:
        return torch.exp2(-8.0 / count * torch.arange(1, count + 1, dtype=torch.float32))

    return torch.cat([geometric(power), geometric(2 * power)[0::2][: heads - power]])
