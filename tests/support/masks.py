"""Masks by plain values: the mask of the package, and the pairs that it shows by definition."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.masks.constraints import Align
from transformer_kernels.masks.mask import Mask

Order = Literal["sorted", "reversed", "shuffled"]


@dataclass(frozen=True, kw_only=True, repr=False)
class PlainValues:
    """Base class of dataclasses whose repr is their source.

    Fields are numbers, strings, tuples and other `PlainValues`.
    """

    def __repr__(self) -> str:
        """Python source of the object, without the fields that have their defaults."""
        given = ((field, getattr(self, field.name)) for field in fields(self))
        text = ", ".join(f"{f.name}={value!r}" for f, value in given if value != f.default)
        return f"{type(self).__name__}({text})"


class Sizes(NamedTuple):
    """Batch entries, query heads, queries and keys."""

    B: int
    H: int
    M: int
    N: int

    def shape(self, dims: str) -> tuple[int, ...]:
        """A shape by letters: those of "bhmn" are sizes, "1" is 1; "b1mn" is (B, 1, M, N)."""
        return tuple(1 if letter == "1" else self["bhmn".index(letter)] for letter in dims)


class Constraint(PlainValues, ABC):
    """One constraint of a mask."""

    @abstractmethod
    def mask(self, sizes: Sizes) -> Mask: ...

    @abstractmethod
    def visible(self, sizes: Sizes) -> Tensor:
        """Bool, broadcastable to (B, H, M, N), by the definition in docs/attention.md."""


@dataclass(frozen=True, repr=False)
class Window(Constraint):
    left: int | None = None
    right: int | None = None
    align: Align = "top_left"

    def mask(self, sizes: Sizes) -> Mask:
        return Mask.window(self.left, self.right, align=self.align)

    def visible(self, sizes: Sizes) -> Tensor:
        d = sizes.N - sizes.M if self.align == "bottom_right" else 0
        i, j = torch.arange(sizes.M)[:, None] + d, torch.arange(sizes.N)
        return _within(j - i, self.left, self.right)


def _within(distance: Tensor, left: int | None, right: int | None) -> Tensor:
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    return visible


CAUSAL, CAUSAL_END = Window(None, 0), Window(None, 0, "bottom_right")


@dataclass(frozen=True, kw_only=True, repr=False)
class KeyRange(Constraint):
    """Start and end of the visible keys of each batch entry, repeated if there are more entries."""

    start: tuple[int, ...] | None = None
    """None: a mask by `Mask.padding`"""
    end: tuple[int, ...]
    dtype: Literal["int64", "int32"] = "int64"

    def _range(self, sizes: Sizes) -> tuple[Tensor, Tensor]:
        def by_entry(values: tuple[int, ...]) -> Tensor:
            repeated = [values[b % len(values)] for b in range(sizes.B)]
            return torch.tensor(repeated, dtype=getattr(torch, self.dtype))

        return by_entry(self.start or (0,)), by_entry(self.end)

    def mask(self, sizes: Sizes) -> Mask:
        start, end = self._range(sizes)
        return Mask.padding(end) if self.start is None else Mask.key_range(start, end)

    def visible(self, sizes: Sizes) -> Tensor:
        j = torch.arange(sizes.N)
        start, end = (x[:, None, None, None] for x in self._range(sizes))
        return (start <= j) & (j < end)


@dataclass(frozen=True, kw_only=True, repr=False)
class Segments(Constraint):
    """Ids of documents of `length` tokens in a row, or `count` ids at random."""

    length: int | None = None
    count: int = 2
    ordered: bool = True
    """True to sort random ids"""
    equal: bool = True
    without: tuple[int, int] = (0, 0)
    """numbers of queries and of keys at the end that are in no document"""
    gap: tuple[int, int] = (0, 0)
    """start and end of further keys that are in no document"""
    seed: int = 0

    def _ids(self, sizes: Sizes) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        ids = []
        for tokens, without, hidden in zip(sizes[2:], self.without, (-1, -2), strict=True):
            one = torch.randint(self.count, (sizes.B, tokens), generator=generator)
            if self.length is not None:
                one = (torch.arange(tokens) // self.length).repeat(sizes.B, 1)
            elif self.ordered:
                one = one.sort(dim=1).values
            one[:, tokens - min(without, tokens) :] = hidden
            ids.append(one)
        ids[1][:, slice(*self.gap)] = -3
        return ids[0], ids[1]

    def mask(self, sizes: Sizes) -> Mask:
        return Mask.segments(*self._ids(sizes), equal=self.equal)

    def visible(self, sizes: Sizes) -> Tensor:
        q_ids, k_ids = self._ids(sizes)
        return (q_ids[:, None, :, None] == k_ids[:, None, None, :]) == self.equal


@dataclass(frozen=True, repr=False)
class Positions(Constraint):
    """A window by random positions. `q_dims`, `k_dims`: those of "bh" in which they differ."""

    left: int | None = None
    right: int | None = 0
    q_dims: str = "b"
    k_dims: str = ""
    q_order: Order = "reversed"
    k_order: Order = "sorted"
    seed: int = 0

    def _positions(self, sizes: Sizes) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def positions(dims: str, length: int, order: Order) -> Tensor:
            B, H = (n if name in dims else 1 for name, n in zip("bh", sizes[:2], strict=True))
            x = (torch.rand(B, H, length, generator=generator) * length).long()
            return x if order == "shuffled" else x.sort(descending=order == "reversed").values

        q_pos = positions(self.q_dims, sizes.M, self.q_order)
        return q_pos.int(), positions(self.k_dims, sizes.N, self.k_order)

    def mask(self, sizes: Sizes) -> Mask:
        return Mask.positions(*self._positions(sizes), self.left, self.right)

    def visible(self, sizes: Sizes) -> Tensor:
        q_pos, k_pos = self._positions(sizes)
        return _within(k_pos[:, :, None, :] - q_pos[..., None], self.left, self.right)


@dataclass(frozen=True, repr=False)
class Intervals(Constraint):
    """Random intervals of positions, of which some are empty, or all but these.

    `q_dims`, `k_dims`: those of "bh" in which they differ."""

    sides: str = "both"
    """low, high or both"""
    inside: bool = True
    q_dims: str = "b"
    k_dims: str = ""
    seed: int = 0

    def _tensors(self, sizes: Sizes) -> tuple[Tensor | None, Tensor | None, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def positions(dims: str, length: int) -> Tensor:
            B, H = (n if name in dims else 1 for name, n in zip("bh", sizes[:2], strict=True))
            return (torch.rand(B, H, length, generator=generator) * sizes.N).long()

        low, high = (positions(self.q_dims, sizes.M) for _ in range(2))
        k_pos = positions(self.k_dims, sizes.N).sort().values
        return (
            None if self.sides == "high" else low.int() - sizes.N // 2,
            None if self.sides == "low" else high,
            k_pos,
        )

    def mask(self, sizes: Sizes) -> Mask:
        return Mask.intervals(*self._tensors(sizes), inside=self.inside)

    def visible(self, sizes: Sizes) -> Tensor:
        low, high, k_pos = self._tensors(sizes)
        visible = torch.ones(sizes.M, sizes.N, dtype=torch.bool)
        if low is not None:
            visible = visible & (low[..., None] <= k_pos[..., None, :])
        if high is not None:
            visible = visible & (k_pos[..., None, :] <= high[..., None])
        return visible == self.inside


@dataclass(frozen=True, repr=False)
class Dense(Constraint):
    """True with a probability of `share` percent, but in no element of the third row of four or
    more and of the fourth column."""

    dims: str = "mn"
    """shape, as in `Sizes.shape`"""
    share: int = 66
    byte: int = 1
    """how True is stored"""
    transposed: bool = False
    seed: int = 0

    def visible(self, sizes: Sizes) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        visible = torch.rand(sizes.shape(self.dims), generator=generator) * 100 < self.share
        if visible.shape[-2] > 3:
            visible[..., 2, :] = False
        visible[..., 3:4] = False
        return visible

    def attn_mask(self, sizes: Sizes) -> Tensor:
        stored = (self.visible(sizes).to(torch.uint8) * self.byte).view(torch.bool)
        return stored.mT.contiguous().mT if self.transposed else stored

    def mask(self, sizes: Sizes) -> Mask:
        return Mask.dense(self.attn_mask(sizes))


@dataclass(frozen=True, repr=False)
class Blocks(Constraint):
    """A block pattern, visible with a probability of `share` percent. The last of several rows of
    blocks is hidden."""

    size: int = 16
    by_head: bool = False
    share: int = 50
    seed: int = 0

    def _blocks(self, sizes: Sizes) -> Tensor:
        rows, columns = -(-sizes.M // self.size), -(-sizes.N // self.size)
        generator = torch.Generator().manual_seed(self.seed)
        heads = sizes.H if self.by_head else 1
        blocks = torch.rand(heads, rows, columns, generator=generator) * 100 < self.share
        blocks[:, max(rows - 1, 1) :] = False
        return blocks

    def mask(self, sizes: Sizes) -> Mask:
        return Mask.block_sparse(self._blocks(sizes), self.size)

    def visible(self, sizes: Sizes) -> Tensor:
        i, j = torch.arange(sizes.M) // self.size, torch.arange(sizes.N) // self.size
        return self._blocks(sizes)[:, i[:, None], j]


@dataclass(frozen=True, repr=False)
class Selected(Constraint):
    """Lists of `count` random blocks of keys, in any order, with repetitions and gaps. The third
    row of four or more selects nothing, and none selects the fourth block."""

    count: int = 40
    size: int = 1
    dims: str = "b"
    """those of "bh" in which the lists differ"""
    seed: int = 0

    def _indices(self, sizes: Sizes) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        B, H = (n if name in self.dims else 1 for name, n in zip("bh", sizes[:2], strict=True))
        blocks = -(-sizes.N // self.size)
        shape = B, H, sizes.M, self.count
        indices = torch.randint(-1, max(blocks, 1), shape, generator=generator)
        if sizes.M > 3:
            indices[:, :, 2] = -1
        return indices.masked_fill(indices == 3, -1) if blocks else torch.full(shape, -1)

    def mask(self, sizes: Sizes) -> Mask:
        indices = self._indices(sizes)
        return Mask.selected(indices if "h" in self.dims else indices[:, 0], self.size)

    def visible(self, sizes: Sizes) -> Tensor:
        block = torch.arange(sizes.N) // self.size
        return (self._indices(sizes)[..., None, :] == block[:, None]).any(dim=-1)


Constraints = Constraint | tuple[Constraint, ...] | None
"""One constraint or an intersection; (): `Mask()`; None: no mask."""


def each_of(constraints: Constraints) -> tuple[Constraint, ...]:
    return (constraints,) if isinstance(constraints, Constraint) else constraints or ()


def mask_of(constraints: Constraints, sizes: Sizes) -> Mask | None:
    if constraints is None:
        return None
    mask = Mask()
    for constraint in each_of(constraints):
        mask &= constraint.mask(sizes)
    return mask


def visible_by(constraints: Constraints, sizes: Sizes) -> Tensor:
    """Returns the visible pairs: bool (B, H, M, N)."""
    visible = torch.ones(sizes, dtype=torch.bool)
    for constraint in each_of(constraints):
        visible &= constraint.visible(sizes)
    return visible


def padding(N: int = 131) -> KeyRange:
    """Almost all, no, one and all keys of entries in turn."""
    return KeyRange(end=(N - 3, 0, 1, N))


def key_range(N: int = 131) -> KeyRange:
    return KeyRange(start=(N // 3, 2, 1, 0), end=(N - 5, 1, 2, N))


DOCUMENTS = Segments(length=31, without=(5, 7))
MIXED = Segments(count=6, ordered=False)
"""Ids that are neither sorted nor contiguous."""
UNEQUAL = Segments(length=2, equal=False)
"""The pairs of different ids, which are equal around the diagonal."""
