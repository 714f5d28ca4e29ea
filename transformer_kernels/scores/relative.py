"""Relative positions: a learned bias by distance, and learned keys by distance.

Kernels read the tables themselves: M + N - 1 rows take the place of an M x N bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.argument_checks import FLOATS, check_int, check_tensor
from ..common.overrides import is_overridden, overridden
from ..masks.constraints import Align, check_align

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
        return _all_distances(self.table.to(dtype), self.lowest, self.align, M, N)

    def dense(self, M: int, N: int) -> Tensor:
        """Returns the same bias as a dense tensor (1, H_q or 1, M, N)."""
        return by_pair(self.by_distance(M, N, self.table.dtype), M, N)[None]

    def as_bias(self, q: Tensor, N: int, scale: float | None = None) -> Tensor:
        """Returns the dense form in q's dtype: see `RelativeKeys.as_bias`."""
        return self.dense(q.shape[2], N).to(q.dtype)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.table,)


@dataclass(frozen=True, eq=False)
class RelativeKeys:
    """Keys by distance e = i + d - j: keys[h, clamp(e, lowest, lowest + E - 1) - lowest].

    Built by `relative_keys`, with an optional bias by the same distances.
    """

    keys: Tensor
    table: Tensor | None
    lowest: int
    align: Align

    def __post_init__(self) -> None:
        check_tensor("keys", self.keys, FLOATS, wanted="a floating-point tensor")
        if self.keys.dim() != 3 or 0 in self.keys.shape[:2]:
            raise ValueError(
                f"keys must be (H_q or 1, E, D) with E >= 1, got shape {tuple(self.keys.shape)}"
            )
        check_int("lowest", self.lowest, -_LARGEST, _LARGEST)
        check_align(self.align)
        bias, entries = self.bias, self.keys.shape[1]
        if bias is not None and bias.table.shape[1] != entries:
            raise ValueError(
                f"table must have the {entries} distances of keys, "
                f"got shape {tuple(bias.table.shape)}"
            )

    @property
    def bias(self) -> RelativeBias | None:
        """The bias by distance, if there is one."""
        return None if self.table is None else RelativeBias(self.table, self.lowest, self.align)

    def by_distance(self, M: int, N: int, dtype: torch.dtype) -> Tensor:
        """Returns the keys of all distances (H_q or 1, M + N - 1, D): see `distances`."""
        return _all_distances(self.keys.to(dtype), self.lowest, self.align, M, N)

    def as_bias(self, q: Tensor, N: int, scale: float | None = None) -> Tensor:
        """Returns the bias (B, H_q, M, N) that replaces keys and table: scale q_i r_e + t_e.

        Args:
            q: queries (B, H_q, M, D).
            N: number of keys.
            scale: factor of the scores; 1/sqrt(D) unless given.
        """
        M, D = q.shape[2:]
        scale = D**-0.5 if scale is None else scale
        scores = products_by_pair(q * scale, self.by_distance(M, N, q.dtype), N)
        return scores if self.bias is None else scores + self.bias.as_bias(q, N)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.keys,) if self.table is None else (self.keys, self.table)


Relative = RelativeBias | RelativeKeys
"""Type of the argument `relative` of the attention functions."""


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
    if is_overridden(table):
        return overridden(relative_bias, table, lowest=lowest, align=align)
    return RelativeBias(table, lowest, align)


def relative_keys(
    keys: Tensor, *, table: Tensor | None = None, lowest: int, align: Align = "top_left"
) -> RelativeKeys:
    """Builds relative keys: the score of query i and key j is scale q_i (k_j + r_e) + t_e.

    r_e = keys[h, clamp(e, lowest, lowest + E - 1) - lowest] with e = i + d - j, and t_e is the
    same entry of the table. The products with r_e precede the softcap and t_e follows it. Kernels
    form the products tile by tile: no M x N bias is stored, in the forward or the backward pass.
    Gradients are sums along diagonals in float32 (float64), and deterministic.

    Transformer-XL (r_e = W_r R_e), Shaw et al. (clipped distances) and rotary-free encoders with
    learned keys are of this form.

    Args:
        keys: (H_q or 1, E, D), E >= 1, floating point, on q's device: r of the distances lowest to
            lowest + E - 1. A distance beyond either end has the key of that end. The kernels read
            it in q's dtype. Distances that the mask's diagonals hide may have any value, also NaN.
        table: (H_q or 1, E), floating point, as for `relative_bias`; none unless given.
        lowest: distance of the first entry. Distances are query index minus key index: a past key
            has a positive distance.
        align: "top_left" (d = 0) or "bottom_right" (d = N - M), which differ if M != N.

    Returns:
        A `RelativeKeys`, for the argument `relative` of the attention functions.

    Raises:
        TypeError: keys or table is not a floating-point tensor, or lowest is not an int.
        ValueError: keys or table has another shape, lowest is beyond 2^31, or align is unknown.

    Source: Shaw et al. 2018, arXiv:1803.02155; Dai et al. 2019, arXiv:1901.02860.
    """
    if is_overridden(keys, table):
        return overridden(relative_keys, keys, table=table, lowest=lowest, align=align)
    return RelativeKeys(keys, table, lowest, align)


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


def products_by_pair(q: Tensor, keys: Tensor, N: int) -> Tensor:
    """Products q_i r_e of every pair: (B, H_q, M, N).

    The products with the keys in descending order of the distance have pair (i, j) in column
    M - 1 - i + j. One more column makes row i of length M + N; read as rows of M + N - 1 elements
    from element M - 1 on, row i is shifted by i. The skew is therefore a view.

    Args:
        q: (B, H_q, M, D).
        keys: keys of all distances (H_q or 1, M + N - 1, D).
        N: number of keys.
    """
    M, count = q.shape[2], keys.shape[1]
    rows: Tensor = q @ torch.nn.functional.pad(keys.flip(1), (0, 0, 0, 1)).mT
    if M > 0 and N > 0:
        rows = rows.flatten(2)[..., M - 1 : M - 1 + M * count].unflatten(2, (M, count))
    return rows[..., :N]


def _all_distances(entries: Tensor, lowest: int, align: Align, M: int, N: int) -> Tensor:
    """Repeats the ends of (H, E, ...), from distance `lowest` on: (H, M + N - 1, ...)."""
    first_distance, count = distances(M, N, align)
    E = entries.shape[1]
    below = min(max(lowest - first_distance, 0), count)
    above = min(max(first_distance + count - lowest - E, 0), count)
    first = min(max(first_distance - lowest, 0), E)
    within = entries[:, first : first + count - below - above]
    if below == above == 0:
        return within

    def repeated(end: Tensor, times: int) -> Tensor:
        return end.expand(-1, times, *end.shape[2:])

    return torch.cat(
        (repeated(entries[:, :1], below), within, repeated(entries[:, -1:], above)), dim=1
    )
