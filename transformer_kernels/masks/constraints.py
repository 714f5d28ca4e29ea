"""The constraints a mask is made of. Each says which pairs it shows, and which sizes it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Align = Literal["top_left", "bottom_right"]


@dataclass(frozen=True)
class Window:
    """Visible: i + d - left <= j <= i + d + right, with d = 0 or N - M by `align`."""

    left: int | None
    right: int | None
    align: Align

    def diagonals(self, M: int, N: int) -> tuple[int | None, int | None]:
        """The same window as `i + low <= j <= i + high`; None where it is unbounded."""
        d = N - M if self.align == "bottom_right" else 0
        low = None if self.left is None else d - self.left
        high = None if self.right is None else d + self.right
        return low, high

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def visible(self, M: int, N: int, device: torch.device) -> Tensor:
        offset = torch.arange(N, device=device)[None, :] - torch.arange(M, device=device)[:, None]
        low, high = self.diagonals(M, N)
        shown = torch.ones(M, N, dtype=torch.bool, device=device)
        if low is not None:
            shown = shown & (offset >= low)
        if high is not None:
            shown = shown & (offset <= high)
        return shown[None, None]

    def check(self, B: int, H: int, M: int, N: int) -> None:
        """Fits every size."""


@dataclass(frozen=True, eq=False)
class KeyRange:
    """Visible: start <= j < end, one pair a batch entry; (B,) integers."""

    start: Tensor | None
    end: Tensor

    def tensors(self) -> dict[str, Tensor]:
        end = {"end": self.end}
        return end if self.start is None else {"start": self.start} | end

    def visible(self, M: int, N: int, device: torch.device) -> Tensor:
        j = torch.arange(N, device=device)
        shown = j < self.end[:, None]
        if self.start is not None:
            shown = shown & (j >= self.start[:, None])
        return shown[:, None, None, :]

    def check(self, B: int, H: int, M: int, N: int) -> None:
        for name, bound in (("start", self.start), ("end (or key_lengths)", self.end)):
            if bound is not None and bound.shape != (B,):
                raise ValueError(
                    f"the mask's {name} must be (batch,) = ({B},), got {tuple(bound.shape)}"
                )


@dataclass(frozen=True, eq=False)
class Segments:
    """Visible where the ids are equal; q_ids (B, M), k_ids (B, N) integers."""

    q_ids: Tensor
    k_ids: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {"q_ids": self.q_ids, "k_ids": self.k_ids}

    def visible(self, M: int, N: int, device: torch.device) -> Tensor:
        return (self.q_ids[:, :, None] == self.k_ids[:, None, :])[:, None]

    def check(self, B: int, H: int, M: int, N: int) -> None:
        for name, ids, length in (("q_ids", self.q_ids, M), ("k_ids", self.k_ids, N)):
            if ids.shape != (B, length):
                raise ValueError(
                    f"the mask's {name} must be (batch, length) = ({B}, {length}), "
                    f"got {tuple(ids.shape)}"
                )


@dataclass(frozen=True, eq=False)
class Dense:
    """Visible where the bool tensor, broadcastable to (B, H, M, N), is True."""

    shown: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {"shown": self.shown}

    def visible(self, M: int, N: int, device: torch.device) -> Tensor:
        return self.shown

    def check(self, B: int, H: int, M: int, N: int) -> None:
        sizes = (B, H, M, N)
        if any(have not in (1, want) for have, want in zip(self.shown.shape, sizes, strict=True)):
            raise ValueError(
                f"the dense mask must broadcast to (B, H, M, N) = {sizes}, "
                f"got {tuple(self.shown.shape)}"
            )


@dataclass(frozen=True, eq=False)
class BlockSparse:
    """Visible where layout[h, i // block_size, j // block_size]; layout (H or 1, rows, columns)."""

    layout: Tensor
    block_size: int

    def tensors(self) -> dict[str, Tensor]:
        return {"layout": self.layout}

    def visible(self, M: int, N: int, device: torch.device) -> Tensor:
        rows = self.layout.repeat_interleave(self.block_size, dim=1)[:, :M]
        return rows.repeat_interleave(self.block_size, dim=2)[None, :, :, :N]

    def check(self, B: int, H: int, M: int, N: int) -> None:
        rows, columns = -(-M // self.block_size), -(-N // self.block_size)
        if self.layout.shape[0] not in (1, H) or self.layout.shape[1:] != (rows, columns):
            raise ValueError(
                f"the mask's layout must be ({H} or 1, {rows}, {columns}) for M = {M}, "
                f"N = {N}, block_size = {self.block_size}; got {tuple(self.layout.shape)}"
            )


Constraint = Window | KeyRange | Segments | Dense | BlockSparse
