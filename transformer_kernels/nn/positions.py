"""Position encodings: learned or sinusoidal vectors of positions or of distances.

Under `distributed.context_parallel`, tokens have their positions in the undivided sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..dispatch import division
from .blocks import STD
from .options import check_positive


class _TablePositions(nn.Module):
    """Adds row p of a table to position p, of `context` positions at most."""

    table: Tensor

    def forward(self, x: Tensor, *, start: int = 0) -> Tensor:
        """x (B, T, width) at positions start, ..., start + T - 1 -> the same shape.

        Raises ValueError if a position is beyond the context.
        """
        context, count = self.table.shape[0], x.shape[1]
        part = division.current
        end = start + count * (1 if part is None else part.ranks)
        if end > context:
            raise ValueError(f"x must be at most {context} positions long (the context), got {end}")
        if part is None:
            return x + self.table[start:end]
        return x + self.table[start + part.positions(count, x.device)]


class LearnedPositions(_TablePositions):
    """Adds a learned vector to each position, of `context` positions at most."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        check_positive("context", context)
        check_positive("width", width)
        self.table = nn.Parameter(torch.zeros(context, width))
        nn.init.normal_(self.table, std=STD)


class SinusoidalPositions(_TablePositions):
    """Adds fixed sine and cosine waves; see `sinusoids`. Has no parameters and no saved state."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.register_buffer("table", sinusoids(context, width), persistent=False)


class RowColumnPositions(nn.Module):
    """Adds two learned vectors to each position: that of its row and that of its column.

    Position p is in row p // columns and column p % columns. Rows repeat after the last one, so
    that every position has an encoding.

    Source: Generating Long Sequences with Sparse Transformers (Child et al., 2019), section 5.3.
    """

    def __init__(self, rows: int, columns: int, width: int) -> None:
        super().__init__()
        check_positive("rows", rows)
        check_positive("columns", columns)
        check_positive("width", width)
        self.rows = nn.Parameter(torch.empty(rows, width))
        self.columns = nn.Parameter(torch.empty(columns, width))
        nn.init.normal_(self.rows, std=STD)
        nn.init.normal_(self.columns, std=STD)

    def forward(self, x: Tensor, *, start: int | Tensor = 0) -> Tensor:
        """x (B, T, width) at positions start, ..., start + T - 1 -> the same shape.

        `start` may be a tensor (B, 1) of integers, one for each text.
        """
        rows, columns = len(self.rows), len(self.columns)
        position = division.token_positions(x.shape[1], x.device) + start
        return x + self.rows[position // columns % rows] + self.columns[position % columns]


def sinusoids(length: int, width: int) -> Tensor:
    """Sinusoidal position encodings.

    Column 2i is sin(position / 10000^(2i/width)), and column 2i + 1 is the cosine of that angle.
    If the width is odd, the last column is a sine without a cosine. Angles are computed in float64.

    Returns:
        (length, width) in torch's default dtype.

    Source: Attention Is All You Need, section 3.5.
    """
    check_positive("length", length)
    check_positive("width", width)
    column = torch.arange(width)
    wavelength = 10000.0 ** (2.0 * (column // 2).double() / width)
    angle = torch.arange(length).double()[:, None] / wavelength
    table = torch.where(column % 2 == 0, angle.sin(), angle.cos())
    return table.to(torch.get_default_dtype())


def distance_sinusoids(
    length: int, width: int, *, clamp: int | None = None, device: torch.device | str | None = None
) -> Tensor:
    """Sinusoidal encodings of distances, in the order of Transformer-XL.

    Row e holds the sines of e / 10000^(2i/width) for all i, followed by the cosines; `sinusoids`
    interleaves them. If the width is odd, the last sine has no cosine. Angles are computed in
    float64: float16 represents whole numbers exactly up to 2048 only, bfloat16 up to 256.

    Args:
        length: number of distances, from 0 on.
        width: size of an encoding.
        clamp: largest distinct distance; larger ones have its encoding.
        device: device of the result.

    Returns:
        (length, width) float64.

    Source: Dai et al. 2019, arXiv:1901.02860, and its reference implementation.
    """
    check_positive("length", length)
    check_positive("width", width)
    distance = torch.arange(length, dtype=torch.float64, device=device)
    if clamp is not None:
        check_positive("clamp", clamp)
        distance = distance.clamp(max=clamp)
    column = torch.arange(0, width, 2, dtype=torch.float64, device=device)
    angle = distance[:, None] / 10000.0 ** (column / width)
    return torch.cat([angle.sin(), angle.cos()], dim=1)[:, :width]
