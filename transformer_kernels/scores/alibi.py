"""ALiBi, a position bias that the kernels compute without storing it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.argument_checks import FLOATS, check_int, check_tensor
from ..common.overrides import is_overridden, overridden
from ..masks.constraints import Align, check_align


@dataclass(frozen=True, eq=False)
class Alibi:
    """ALiBi bias: bias[b, h, i, j] = -slopes[b, h] * |i + d - j|. Built by `alibi`.

    d is 0 for align="top_left" and N - M for align="bottom_right".
    """

    slopes: Tensor
    align: Align = "top_left"

    def __post_init__(self) -> None:
        check_tensor("slopes", self.slopes, FLOATS, wanted="a floating-point tensor")
        if self.slopes.dim() not in (1, 2):
            raise ValueError(
                f"slopes must be (H_q,) or (B, H_q), got shape {tuple(self.slopes.shape)}"
            )
        check_align(self.align)

    def offset(self, M: int, N: int) -> int:
        """Returns d."""
        return N - M if self.align == "bottom_right" else 0

    def dense(self, M: int, N: int) -> Tensor:
        """Returns the same bias as a dense tensor (1 or B, H_q, M, N)."""
        i = torch.arange(M, device=self.slopes.device)[:, None]
        j = torch.arange(N, device=self.slopes.device)[None, :]
        distance = (i + self.offset(M, N) - j).abs().to(self.slopes.dtype)
        slopes = self.slopes if self.slopes.dim() == 2 else self.slopes[None]
        return -slopes[:, :, None, None] * distance


def alibi(slopes: Tensor, *, align: Align = "top_left") -> Alibi:
    """Builds an ALiBi bias, -slopes[h] * |i + d - j|, which the kernels compute from positions.

    Under a causal mask it equals slopes[h] * (j - i) up to a constant per row, which the softmax
    cancels.

    Args:
        slopes: (H_q,), floating point, on q's device; `alibi_slopes` computes those of the paper.
            Or (B, H_q), which may not require grad: slopes of each batch entry or sequence.
        align: "top_left" (d = 0) or "bottom_right" (d = N - M), which differ if M != N.

    Returns:
        An `Alibi`, for the argument `bias` of the attention functions.

    Raises:
        TypeError: slopes is not a floating-point tensor.
        ValueError: slopes has another number of dimensions, or align is unknown.

    Source: Press et al. 2022, arXiv:2108.12409.
    """
    if is_overridden(slopes):
        return overridden(alibi, slopes, align=align)
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
        TypeError: heads is not an int.
        ValueError: heads is not from 1 to 2^31 - 1.

    Source: Press et al. 2022, arXiv:2108.12409.
    """
    check_int("heads", heads, 1, (1 << 31) - 1)
    power = 1 << (heads.bit_length() - 1)

    def geometric(count: int) -> Tensor:
        return torch.exp2(-8.0 / count * torch.arange(1, count + 1, dtype=torch.float32))

    return torch.cat([geometric(power), geometric(2 * power)[0::2][: heads - power]])
