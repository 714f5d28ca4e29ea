"""Relative position bias: a learned table by distance.

Kernels read the table itself: M + N - 1 values take the place of an M x N bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_kernels.argument_checks import FLOATS, check_int, check_tensor
from transformer_kernels.masks.constraints import Align, check_align

_LARGEST = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """Bias by distance e = i + d - j: table[h, clamp(e, lowest, lowest + E - 1) - lowest].

    Built by `relative_bias`. d is 0 for align="top_left" and N - M for align="bottom_right".
    """

    table: Tensor
    lowest: int
    align: Align

    def __post_init__(self) -> None:
        check_tensor("table", self.table, FLOATS, wanted="a floating-point tensor")
        if self.table.dim() != 2 or 0 in self.table.shape:
            raise ValueError(
                f"table must be (H_q or 1, E) with E >= 1, got shape {tuple(self.table.shape)}"
            )
        check_int("lowest", self.lowest, -_LARGEST, _LARGEST)
        check_align(self.align)

    def by_distance(self, M: int, N: int, dtype: torch.dtype) -> Tensor:
        """Returns a table of all distances (H_q or 1, M + N - 1): see `distances`.

        Its gradient is summed over clamped distances in `dtype`, without atomic additions.
        """
        lowest, count = distances(M, N, self.align)
        table, entries = self.table.to(dtype), self.table.shape[1]
        below = min(max(self.lowest - lowest, 0), count)
        above = min(max(lowest + count - self.lowest - entries, 0), count)
        first = min(max(lowest - self.lowest, 0), entries)
        within = table[:, first : first + count - below - above]
        if below == above == 0:
            return within
        return torch.cat(
            (table[:, :1].expand(-1, below), within, table[:, -1:].expand(-1, above)), dim=1
        )

    def dense(self, M: int, N: int) -> Tensor:
        """Returns the same bias as a dense tensor (1, H_q or 1, M, N)."""
        return by_pair(self.by_distance(M, N, self.table.dtype), M, N)[None]


def relative_bias(table: Tensor, *, lowest: int, align: Align = "top_left") -> RelativeBias:
    """Builds a relative position bias, table[h, clamp(i + d - j, lowest, lowest + E - 1) - lowest].

    The kernels read the table by distance: no M x N bias is stored, in the forward or the backward
    pass. The gradient of the table, the gradient of the scores summed along diagonals, is
    deterministic. Buckets (T5) and functions of the distance (ALiBi, KERPLE, FIRE) are tables too:
    `buckets[:, bucket_of(e)]` or `f(e)` for e = lowest, lowest + 1, ...

    Args:
        table: (H_q or 1, E), E >= 1, floating point, on q's device: the bias of the distances
            lowest to lowest + E - 1. A distance beyond either end has the bias of that end.
        lowest: distance of the first entry. Distances are query index minus key index: a past key
            has a positive distance.
        align: "top_left" (d = 0) or "bottom_right" (d = N - M), which differ if M != N.

    Returns:
        A `RelativeBias`, for the argument `relative` of the attention functions.

    Raises:
        TypeError: table is not a floating-point tensor, or lowest is not an int.
        ValueError: table is not (H_q or 1, E) with E >= 1, lowest is beyond 2^31, or align is
            unknown.

    Source: Shaw et al. 2018, arXiv:1803.02155; Raffel et al. 2020, arXiv:1910.10683.
    """
    return RelativeBias(table, lowest, align)


def alibi_by_distance(slopes: Tensor, align: Align, M: int, N: int) -> Tensor:
    """Returns an ALiBi bias as a table of all distances (H_q, M + N - 1), in the slopes' dtype."""
    lowest, count = distances(M, N, align)
    distance = torch.arange(lowest, lowest + count, dtype=slopes.dtype, device=slopes.device)
    return -slopes[:, None] * distance.abs()


def distances(M: int, N: int, align: Align) -> tuple[int, int]:
    """Returns the lowest distance i + d - j of M queries and N keys, and the number of distances.

    They are those of any shorter sequences too, for which d follows from their own lengths.
    """
    lowest = 1 - M if align == "bottom_right" else 1 - N
    return lowest, max(M + N - 1, 0)


def by_pair(table: Tensor, M: int, N: int) -> Tensor:
    """Reads a table of all distances (H, M + N - 1) for every pair: (H, M, N)."""
    i, j = torch.arange(M, device=table.device)[:, None], torch.arange(N, device=table.device)
    return table[:, i - j + (N - 1)]
