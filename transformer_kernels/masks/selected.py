"""The constraint of selected keys: lists of the keys, or blocks of keys, that each query sees."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.argument_checks import values_are_readable

_LARGEST = (1 << 31) - 1


def ascending(indices: Tensor) -> Tensor:
    """Returns lists in the form of `Selected`: int32, ascending, without repeated indices."""
    x = indices.contiguous()
    if x.dtype is not torch.int32:
        x = x.long().clamp(-1, _LARGEST).int()
    if x.shape[-1] == 0:
        return x.new_full((*x.shape[:-1], 1), -1)
    if values_are_readable(x):
        before, after = x[..., :-1], x[..., 1:]
        if bool(((before < after) | ((before <= after) & (after < 0))).all()):
            return x
    x = x.sort(dim=-1).values
    is_repeated = x[..., 1:] == x[..., :-1]
    first = torch.zeros_like(x[..., :1], dtype=torch.bool)
    return x.masked_fill(torch.cat([first, is_repeated], dim=-1), -1).sort(dim=-1).values


@dataclass(frozen=True, eq=False)
class Selected:
    """Visible: j // block_size is in indices[b, h, i]; int32 (1|B, 1|H, M, count).

    A list ascends without repeated indices, after negative ones in any order. These and blocks
    past the last key select nothing.
    """

    indices: Tensor
    block_size: int

    def tensors(self) -> dict[str, Tensor]:
        return {"indices": self.indices}

    def visible(self, M: int, N: int, device: torch.device) -> Tensor:
        blocks = -(-N // self.block_size)
        listed = self.indices.long()
        listed = listed.masked_fill((listed < 0) | (listed >= blocks), blocks)
        visible = listed.new_zeros(*listed.shape[:-1], blocks + 1, dtype=torch.bool)
        visible = visible.scatter(-1, listed, True)[..., :blocks]
        return visible.repeat_interleave(self.block_size, dim=-1)[..., :N]

    def part(self, rows: range, columns: range, M: int, N: int) -> Selected:
        finer = self.refined(math.gcd(self.block_size, columns.start))
        size = finer.block_size
        x = finer.indices[:, :, rows.start : rows.stop] - columns.start // size
        blocks = -(-len(columns) // size)
        return Selected(x.masked_fill(x >= blocks, -1).clamp(min=-1).sort(dim=-1).values, size)

    def refined(self, block_size: int) -> Selected:
        """Returns the same constraint by smaller blocks, whose size divides that of these."""
        count = self.block_size // block_size
        if count == 1:
            return self
        part = torch.arange(count, device=self.indices.device)
        parts = self.indices.long()[..., None] * count + part
        return Selected(parts.flatten(-2).clamp(max=_LARGEST).int(), block_size)

    def extent(self) -> tuple[int, int]:
        return self.indices.shape[0], self.indices.shape[1]

    def check(self, B: int, H: int, M: int, N: int) -> None:
        batch, heads, rows, _ = self.indices.shape
        if batch not in (1, B) or heads not in (1, H) or rows != M:
            raise ValueError(
                "the mask's indices must be (batch or 1, heads or 1, queries, count) = "
                f"({B} or 1, {H} or 1, {M}, count), got {tuple(self.indices.shape)}"
            )
        blocks = -(-N // self.block_size)
        if self.indices.numel() == 0 or not values_are_readable(self.indices):
            return
        largest = self.indices[..., -1].max()
        if values_are_readable(largest) and largest >= blocks:
            raise ValueError(
                f"the mask's indices must be less than {blocks} for N = {N}, block_size = "
                f"{self.block_size}, got {int(largest)}"
            )


def intersection(a: Selected, b: Selected) -> Selected:
    """Returns the keys that both constraints select."""
    size = math.gcd(a.block_size, b.block_size)
    x, y = a.refined(size).indices, b.refined(size).indices
    shape = torch.broadcast_shapes(x.shape[:-1], y.shape[:-1])
    x, y = (one.expand(*shape, -1).contiguous() for one in (x, y))
    at = torch.searchsorted(y, x).clamp(max=y.shape[-1] - 1)
    return Selected(x.masked_fill(y.gather(-1, at) != x, -1).sort(dim=-1).values, size)
