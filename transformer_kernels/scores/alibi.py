"""ALiBi, a position bias that the kernels compute without storing it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_kernels.masks.constraints import Align


@dataclass(frozen=True, eq=False)
class Alibi:
    """ALiBi bias: bias[b, h, i, j] = -slopes[h] * |i + d - j|. Built by `alibi`.

    d is 0 for align="top_left" and N - M for align="bottom_right".
    """

    slopes: Tensor
    align: Align = "top_left"

    def dense(self, M: int, N: int) -> Tensor:
        """Returns the same bias as a dense tensor (1, H_q, M, N)."""
        d = N - M if self.align == "bottom_right" else 0
        i = torch.arange(M, device=self.slopes.device)[:, None]
        j = torch.arange(N, device=self.slopes.device)[None, :]
        distance = (i + d - j).abs().to(self.slopes.dtype)
        return -self.slopes[None, :, None, None] * distance


def alibi(slopes: Tensor, *, align: Align = "top_left") -> Alibi:
    """Builds an ALiBi bias, -slopes[h] * |i + d - j|, which the kernels compute from positions.

    Under a causal mask it equals slopes[h] * (j - i) up to a constant per row, which the softmax
    cancels.

    Args:
        slopes: (H_q,), floating point, on q's device; `alibi_slopes` computes those of the paper.
            Slopes that require grad are supported by the backend "reference" only.
        align: "top_left" (d = 0) or "bottom_right" (d = N - M), which differ if M != N.

    Returns:
        An `Alibi`, for the argument `bias` of the attention functions.

    Raises:
        TypeError: slopes is not a floating-point tensor.
        ValueError: slopes is not one-dimensional, or align is unknown.

    Source: Press et al. 2022, arXiv:2108.12409.
    """
    if not isinstance(slopes, Tensor) or not slopes.dtype.is_floating_point:
        raise TypeError(f"slopes must be a floating-point tensor, got {slopes!r}")
    if slopes.dim() != 1:
        raise ValueError(f"slopes must be (H_q,), got shape {tuple(slopes.shape)}")
    if align not in ("top_left", "bottom_right"):
        raise ValueError(f"align must be 'top_left' or 'bottom_right', got {align!r}")
    return Alibi(slopes, align)


def alibi_slopes(heads: int) -> Tensor:
    """Returns the ALiBi slopes of the paper: 2^(-8 h / heads) for h = 1 to heads.

    If `heads` is not a power of two, the slopes for the next lower power of two come first, then
    every other slope for the next higher one, as in the paper's code.

    Args:
        heads: query heads, at least 1.

    Returns:
        float32 (heads,), on the CPU.

    Raises:
        ValueError: heads is not a positive int.

    Source: Press et al. 2022, arXiv:2108.12409.
    """
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(f"heads must be a positive int, got {heads!r}")
    power = 1 << int(math.log2(heads))

    def geometric(count: int) -> Tensor:
        return torch.exp2(-8.0 / count * torch.arange(1, count + 1, dtype=torch.float32))

    return torch.cat([geometric(power), geometric(2 * power)[0::2][: heads - power]])
