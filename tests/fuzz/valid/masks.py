"""Masks by plain values: the mask of the package, and the pairs that it shows by definition."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tests.fuzz.call import PlainValues
from transformer_kernels.masks.constraints import Align
from transformer_kernels.masks.mask import Mask


class Sizes(NamedTuple):
    B: int
    H: int
    M: int
    N: int


class Constraint(PlainValues, ABC):
    """One constraint of a mask."""

    @abstractmethod
    def mask(self, sizes: Sizes) -> Mask: ...

    @abstractmethod
    def visible(self, sizes: Sizes) -> Tensor:
        """Bool, broadcastable to (B, H, M, N), by the definition in docs/attention.md."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Window(Constraint):
    left: int | None = None
    right: int | None = None
    align: Align = "top_left"

    def mask(self, sizes: Sizes) -> Mask:
        return Mask.window(self.left, self.right, align=self.align)

    def visible(self, sizes: Sizes) -> Tensor:
        d = sizes.N - sizes.M if self.align == "bottom_right" else 0
        i, j = torch.arange(sizes.M)[:, None] + d, torch.arange(sizes.N)
        visible = torch.ones(sizes.M, sizes.N, dtype=torch.bool)
        if self.left is not None:
            visible &= j >= i - self.left
        if self.right is not None:
            visible &= j <= i + self.right
        return visible


@dataclass(frozen=True, kw_only=True, repr=False)
class KeyRange(Constraint):
    """Starts and lengths are taken modulo N + 1."""

    start: tuple[int, ...] | None = None
    length: tuple[int, ...]

    def _range(self, sizes: Sizes) -> tuple[Tensor, Tensor]:
        start = torch.tensor(_repeated(self.start or (0,), sizes.B)) % (sizes.N + 1)
        return start, start + torch.tensor(_repeated(self.length, sizes.B)) % (sizes.N + 1)

    def mask(self, sizes: Sizes) -> Mask:
        start, end = self._range(sizes)
        return Mask.padding(end) if self.start is None else Mask.key_range(start, end)

    def visible(self, sizes: Sizes) -> Tensor:
        j = torch.arange(sizes.N)
        start, end = (x[:, None, None, None] for x in self._range(sizes))
        return (start <= j) & (j < end)


@dataclass(frozen=True, kw_only=True, repr=False)
class Segments(Constraint):
    """Ids from 0 to count - 1, sorted (documents packed in a row) or at random."""

    count: int = 2
    ordered: bool = True
    equal: bool = True
    seed: int = 0

    def _ids(self, sizes: Sizes) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        ids = [
            torch.randint(self.count, (sizes.B, length), generator=generator)
            for length in (sizes.M, sizes.N)
        ]
        q_ids, k_ids = (x.sort(dim=1).values if self.ordered else x for x in ids)
        return q_ids, k_ids

    def mask(self, sizes: Sizes) -> Mask:
        return Mask.segments(*self._ids(sizes), equal=self.equal)

    def visible(self, sizes: Sizes) -> Tensor:
        q_ids, k_ids = self._ids(sizes)
        return (q_ids[:, None, :, None] == k_ids[:, None, None, :]) == self.equal


@dataclass(frozen=True, kw_only=True, repr=False)
class Positions(Constraint):
    """Positions from 0 to length - 1, shuffled except `ordered`. `dims`: those of "bh" that q_pos
    has."""

    left: int | None = None
    right: int | None = 0
    dims: str = "b"
    ordered: bool = True
    seed: int = 0

    def _positions(self, sizes: Sizes) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        B, H = (n if name in self.dims else 1 for name, n in zip("bh", sizes[:2], strict=True))
        q_pos = torch.rand(B, H, sizes.M, generator=generator)
        k_pos = torch.rand(sizes.B, 1, sizes.N, generator=generator)
        if self.ordered:
            q_pos, k_pos = q_pos.sort(dim=-1).values, k_pos.sort(dim=-1).values
        return (q_pos * sizes.M).int(), (k_pos * sizes.N).long()

    def mask(self, sizes: Sizes) -> Mask:
        return Mask.positions(*self._positions(sizes), self.left, self.right)

    def visible(self, sizes: Sizes) -> Tensor:
        q_pos, k_pos = self._positions(sizes)
        distance = k_pos[:, :, None, :] - q_pos[..., None]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            visible &= distance >= -self.left
        if self.right is not None:
            visible &= distance <= self.right
        return visible


@dataclass(frozen=True, kw_only=True, repr=False)
class Dense(Constraint):
    """True with a probability of `share` percent. `dims`: those of "bhmn" that are not 1."""

    dims: str = "mn"
    share: int = 50
    byte: int = 1
    """how True is stored"""
    transposed: bool = False
    seed: int = 0

    def visible(self, sizes: Sizes) -> Tensor:
        shape = [size if name in self.dims else 1 for name, size in zip("bhmn", sizes, strict=True)]
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(shape, generator=generator) * 100 < self.share

    def attn_mask(self, sizes: Sizes) -> Tensor:
        """The mask as it is stored."""
        stored = (self.visible(sizes).to(torch.uint8) * self.byte).view(torch.bool)
        return stored.mT.contiguous().mT if self.transposed else stored

    def mask(self, sizes: Sizes) -> Mask:
        return Mask.dense(self.attn_mask(sizes))


@dataclass(frozen=True, kw_only=True, repr=False)
class Blocks(Constraint):
    """A block pattern, visible with a probability of `share` percent."""

    size: int = 16
    by_head: bool = False
    share: int = 50
    seed: int = 0

    def _blocks(self, sizes: Sizes) -> Tensor:
        rows, columns = -(-sizes.M // self.size), -(-sizes.N // self.size)
        generator = torch.Generator().manual_seed(self.seed)
        heads = sizes.H if self.by_head else 1
        return torch.rand(heads, rows, columns, generator=generator) * 100 < self.share

    def mask(self, sizes: Sizes) -> Mask:
        return Mask.block_sparse(self._blocks(sizes), self.size)

    def visible(self, sizes: Sizes) -> Tensor:
        i, j = torch.arange(sizes.M) // self.size, torch.arange(sizes.N) // self.size
        return self._blocks(sizes)[:, i[:, None], j]


def mask_of(constraints: tuple[Constraint, ...], sizes: Sizes) -> Mask | None:
    """The intersection of the constraints; None without any."""
    masks = [constraint.mask(sizes) for constraint in constraints]
    whole: Mask | None = None
    for mask in masks:
        whole = mask if whole is None else whole & mask
    return whole


def visible_by(constraints: tuple[Constraint, ...], sizes: Sizes) -> Tensor:
    """Bool (B, H, M, N)."""
    visible = torch.ones(sizes, dtype=torch.bool)
    for constraint in constraints:
        visible &= constraint.visible(sizes)
    return visible


def _repeated(values: tuple[int, ...], count: int) -> list[int]:
    return [values[n % len(values)] for n in range(count)]
