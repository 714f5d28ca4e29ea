"""Constraints of a mask. Each one defines the (query, key) pairs that it makes visible.

The interface of a constraint: `visible` returns a bool tensor broadcastable to (B, H, M, N),
`extent` returns its sizes in the dimensions B and H, `check` raises ValueError if its tensors do
not fit the sizes, `tensors` returns them by field name, and `part` returns the constraint on a
range of the M queries and a range of the N keys, counted from the first of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..common.argument_checks import shown
from .selected import Selected

Align = Literal["top_left", "bottom_right"]

UNBOUNDED = 1 << 62
"""Diagonal offset beyond every index; index + UNBOUNDED still fits in 64 bits."""
_LIMITS = torch.iinfo(torch.int64)


def check_align(align: Align) -> None:
    if not isinstance(align, str) or align not in ("top_left", "bottom_right"):
        raise ValueError(f"align must be 'top_left' or 'bottom_right', got {shown(align)}")


@dataclass(frozen=True)
class Window:
    """Visible: i + d - left <= j <= i + d + right; d is 0 (top_left) or N - M (bottom_right)."""

    left: int | None
    right: int | None
    align: Align

    @property
    def is_bounded(self) -> bool:
        return self.left is not None or self.right is not None

    def offset(self, M: int, N: int) -> int:
        """Returns d."""
        return N - M if self.align == "bottom_right" else 0

    def diagonals(self, d: int) -> tuple[int | None, int | None]:
        """Returns (low, high) with i + low <= j <= i + high visible; None if unbounded."""
        low = None if self.left is None else d - self.left
        high = None if self.right is None else d + self.right
        return low, high

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def visible(self, M: int, N: int, device: torch.device) -> Tensor:
        offset = torch.arange(N, device=device)[None, :] - torch.arange(M, device=device)[:, None]
        low, high = self.diagonals(self.offset(M, N))
        visible = torch.ones(M, N, dtype=torch.bool, device=device)
        if low is not None:
            visible = visible & (offset >= low)
        if high is not None:
            visible = visible & (offset <= high)
        return visible[None, None]

    def part(self, rows: range, columns: range, M: int, N: int) -> Window:
        d = self.offset(M, N) - self.offset(len(rows), len(columns))
        low, high = self.diagonals(d + rows.start - columns.start)
        left = None if low is None else min(max(-low, -UNBOUNDED), UNBOUNDED)
        right = None if high is None else min(max(high, -UNBOUNDED), UNBOUNDED)
        return Window(left, right, self.align)

    def extent(self) -> tuple[int, int]:
        return 1, 1

    def check(self, B: int, H: int, M: int, N: int) -> None:
        """Accepts all sizes."""


@dataclass(frozen=True, eq=False)
class KeyRange:
    """Visible: start[b] <= j < end[b]; (B,) integers. A start of None means 0."""

    start: Tensor | None
    end: Tensor

    def tensors(self) -> dict[str, Tensor]:
        end = {"end": self.end}
        return end if self.start is None else {"start": self.start} | end

    def visible(self, M: int, N: int, device: torch.device) -> Tensor:
        j = torch.arange(N, device=device)
        visible = j < self.end.long()[:, None]
        if self.start is not None:
            visible = visible & (j >= self.start.long()[:, None])
        return visible[:, None, None, :]

    def part(self, rows: range, columns: range, M: int, N: int) -> KeyRange:
        first = columns.start
        start, end = (
            None if bound is None else bound.long().clamp(min=first) - first
            for bound in (self.start, self.end)
        )
        assert end is not None
        return KeyRange(start, end)

    def extent(self) -> tuple[int, int]:
        return self.end.shape[0], 1

    def check(self, B: int, H: int, M: int, N: int) -> None:
        for name, bound in (("start", self.start), ("end (or key_lengths)", self.end)):
            if bound is not None and bound.shape != (B,):
                raise ValueError(
                    f"the mask's {name} must be (batch,) = ({B},), got {tuple(bound.shape)}"
                )


@dataclass(frozen=True, eq=False)
class Segments:
    """Visible: q_ids[b, i] == k_ids[b, j], or != if not `equal`; integers (B, M) and (B, N)."""

    q_ids: Tensor
    k_ids: Tensor
    equal: bool = True

    def tensors(self) -> dict[str, Tensor]:
        return {"q_ids": self.q_ids, "k_ids": self.k_ids}

    def visible(self, M: int, N: int, device: torch.device) -> Tensor:
        equal = self.q_ids.long()[:, :, None] == self.k_ids.long()[:, None, :]
        return (equal if self.equal else ~equal)[:, None]

    def part(self, rows: range, columns: range, M: int, N: int) -> Segments:
        return Segments(_within(self.q_ids, rows), _within(self.k_ids, columns), self.equal)

    def test(self) -> PositionTest:
        low = high = self.q_ids.long()[:, None]
        if not self.equal:
            low, high = low + 1, high - 1
        return PositionTest(low, high, self.k_ids.long()[:, None])

    def extent(self) -> tuple[int, int]:
        return self.q_ids.shape[0], 1

    def check(self, B: int, H: int, M: int, N: int) -> None:
        for name, ids, length in (("q_ids", self.q_ids, M), ("k_ids", self.k_ids, N)):
            if ids.shape != (B, length):
                raise ValueError(
                    f"the mask's {name} must be (batch, length) = ({B}, {length}), "
                    f"got {tuple(ids.shape)}"
                )


@dataclass(frozen=True, eq=False)
class Positions:
    """Visible: q_pos[b, h, i] - left <= k_pos[b, h, j] <= q_pos[b, h, i] + right.

    Integers (1|B, 1|H, M) and (1|B, 1|H, N), or without H. A side of None is unbounded.
    """

    q_pos: Tensor
    k_pos: Tensor
    left: int | None
    right: int | None

    def tensors(self) -> dict[str, Tensor]:
        return {"q_pos": self.q_pos, "k_pos": self.k_pos}

    def visible(self, M: int, N: int, device: torch.device) -> Tensor:
        q_pos = _clamped(self.q_pos)[..., :, None]
        k_pos = _clamped(self.k_pos)[..., None, :]
        B, H = (max(q_pos.shape[d], k_pos.shape[d]) for d in (0, 1))
        visible = torch.ones(B, H, M, N, dtype=torch.bool, device=device)
        if self.left is not None:
            visible = visible & (k_pos >= q_pos - self.left)
        if self.right is not None:
            visible = visible & (k_pos <= q_pos + self.right)
        return visible

    def part(self, rows: range, columns: range, M: int, N: int) -> Positions:
        q_pos, k_pos = _within(self.q_pos, rows), _within(self.k_pos, columns)
        return Positions(q_pos, k_pos, self.left, self.right)

    def test(self) -> PositionTest:
        q_pos = _clamped(self.q_pos)
        low = torch.full_like(q_pos, _LIMITS.min) if self.left is None else q_pos - self.left
        high = torch.full_like(q_pos, _LIMITS.max) if self.right is None else q_pos + self.right
        if self.left is not None and self.right is not None and self.left + self.right < 0:
            low = high = torch.full_like(q_pos, _LIMITS.min)  # below every position
        return PositionTest(low, high, _clamped(self.k_pos))

    def extent(self) -> tuple[int, int]:
        return _extent_of(self)

    def check(self, B: int, H: int, M: int, N: int) -> None:
        _check_positions(self, B, H, M, N)


@dataclass(frozen=True, eq=False)
class Intervals:
    """Visible: low[b, h, i] <= k_pos[b, h, j] <= high[b, h, i]; if not `inside`, all but these.

    Integers (1|B, 1|H, M) and (1|B, 1|H, N), or without H. A bound of None is unbounded.
    """

    low: Tensor | None
    high: Tensor | None
    k_pos: Tensor
    inside: bool = True

    def tensors(self) -> dict[str, Tensor]:
        given = {"low": self.low, "high": self.high, "k_pos": self.k_pos}
        return {name: x for name, x in given.items() if x is not None}

    def visible(self, M: int, N: int, device: torch.device) -> Tensor:
        k_pos = _clamped(self.k_pos)[..., None, :]
        inside = torch.ones(M, N, dtype=torch.bool, device=device)
        if self.low is not None:
            inside = inside & (_clamped(self.low)[..., None] <= k_pos)
        if self.high is not None:
            inside = inside & (k_pos <= _clamped(self.high)[..., None])
        return inside if self.inside else ~inside

    def part(self, rows: range, columns: range, M: int, N: int) -> Intervals:
        low, high = (None if x is None else _within(x, rows) for x in (self.low, self.high))
        return Intervals(low, high, _within(self.k_pos, columns), self.inside)

    def test(self) -> PositionTest:
        low, high = (None if x is None else _clamped(x) for x in (self.low, self.high))
        lowest, highest = _LIMITS.min, _LIMITS.max
        if low is not None and high is not None:
            low, high = torch.broadcast_tensors(low, high)
            is_empty = low > high
            if self.inside:  # an empty interval: a point where no key is
                ends = torch.where(is_empty, lowest, low), torch.where(is_empty, lowest, high)
            else:
                low, high = high + 1, low - 1
                ends = torch.where(is_empty, lowest, low), torch.where(is_empty, highest, high)
        elif high is not None:
            end = torch.full_like(high, lowest if self.inside else highest)
            ends = (end, high) if self.inside else (high + 1, end)
        else:
            assert low is not None
            end = torch.full_like(low, highest if self.inside else lowest)
            ends = (low, end) if self.inside else (end, low - 1)
        return PositionTest(*ends, _clamped(self.k_pos))

    def extent(self) -> tuple[int, int]:
        return _extent_of(self)

    def check(self, B: int, H: int, M: int, N: int) -> None:
        _check_positions(self, B, H, M, N)


class PositionTest(NamedTuple):
    """Position test of the kernels: int64 low and high (1|B, 1|H, M), position (1|B, 1|H, N).

    Visible: low[b, h, i] <= position[b, h, j] <= high[b, h, i] on the circle of 64-bit integers:
    with low > high, positions from low up and those from high down.
    """

    low: Tensor
    high: Tensor
    position: Tensor

    def visible(self) -> Tensor:
        """Returns bool, broadcastable to (B, H, M, N)."""
        low, high = self.low[..., None], self.high[..., None]
        position = self.position[..., None, :]
        from_low, to_high = position >= low, position <= high
        return torch.where(low <= high, from_low & to_high, from_low | to_high)


@dataclass(frozen=True, eq=False)
class Dense:
    """Visible: attn_mask[b, h, i, j]; 4-D bool, broadcastable to (B, H, M, N)."""

    attn_mask: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {"attn_mask": self.attn_mask}

    def visible(self, M: int, N: int, device: torch.device) -> Tensor:
        return self.attn_mask

    def part(self, rows: range, columns: range, M: int, N: int) -> Dense:
        x = self.attn_mask
        x = x if x.shape[3] == 1 else _within(x, columns)
        return Dense(x if x.shape[2] == 1 else _within(x.mT, rows).mT)

    def extent(self) -> tuple[int, int]:
        return self.attn_mask.shape[0], self.attn_mask.shape[1]

    def check(self, B: int, H: int, M: int, N: int) -> None:
        sizes = (B, H, M, N)
        if any(
            have not in (1, want) for have, want in zip(self.attn_mask.shape, sizes, strict=True)
        ):
            raise ValueError(
                f"the dense mask must broadcast to (B, H, M, N) = {sizes}, "
                f"got {tuple(self.attn_mask.shape)}"
            )


@dataclass(frozen=True, eq=False)
class BlockSparse:
    """Visible: blocks[h, i // block_size, j // block_size]; bool (H or 1, rows, columns)."""

    blocks: Tensor
    block_size: int

    def tensors(self) -> dict[str, Tensor]:
        return {"blocks": self.blocks}

    def visible(self, M: int, N: int, device: torch.device) -> Tensor:
        rows, columns = (
            torch.arange(length, device=self.blocks.device) // self.block_size for length in (M, N)
        )
        return self.blocks.index_select(1, rows).index_select(2, columns)[None]

    def part(self, rows: range, columns: range, M: int, N: int) -> BlockSparse:
        return BlockSparse(*blocks_part(self.blocks, self.block_size, rows, columns))

    def extent(self) -> tuple[int, int]:
        return 1, self.blocks.shape[0]

    def check(self, B: int, H: int, M: int, N: int) -> None:
        rows, columns = -(-M // self.block_size), -(-N // self.block_size)
        if self.blocks.shape[0] not in (1, H) or self.blocks.shape[1:] != (rows, columns):
            raise ValueError(
                f"the mask's blocks must be ({H} or 1, {rows}, {columns}) for M = {M}, "
                f"N = {N}, block_size = {self.block_size}; got {tuple(self.blocks.shape)}"
            )


Constraint = Window | KeyRange | Segments | Positions | Intervals | Dense | BlockSparse | Selected


def blocks_part(blocks: Tensor, block_size: int, rows: range, columns: range) -> tuple[Tensor, int]:
    """Returns the blocks of a range of queries and keys, and their size.

    They are smaller than those given unless both ranges start at a multiple of these.
    """
    size = math.gcd(block_size, rows.start, columns.start)
    for dim, tokens in ((1, rows), (2, columns)):
        block = torch.arange(-(-len(tokens) // size), device=blocks.device)
        blocks = blocks.index_select(dim, (block * size + tokens.start) // block_size)
    return blocks, size


def _within(x: Tensor, tokens: range) -> Tensor:
    """Returns the tokens of x (..., length)."""
    return x[..., tokens.start : tokens.stop]


def _extent_of(one: Positions | Intervals) -> tuple[int, int]:
    batches, heads, _ = zip(*map(_sizes, one.tensors().values()), strict=True)
    return max(batches), max(heads)


def _check_positions(one: Positions | Intervals, B: int, H: int, M: int, N: int) -> None:
    for name, positions in one.tensors().items():
        length = N if name == "k_pos" else M
        sizes = _sizes(positions)
        if sizes[0] not in (1, B) or sizes[1] not in (1, H) or sizes[2] != length:
            raise ValueError(
                f"the mask's {name} must be (batch or 1, heads or 1, length) = "
                f"({B} or 1, {H} or 1, {length}), got {tuple(positions.shape)}"
            )


def _sizes(positions: Tensor) -> tuple[int, int, int]:
    """Returns (batch, heads, length) of positions, whose heads may be left out."""
    shape = positions.shape
    return shape[0], shape[1] if len(shape) == 3 else 1, shape[-1]


def _clamped(positions: Tensor) -> Tensor:
    """Returns (1|B, 1|H, length) in int64, at most UNBOUNDED - 1 from 0: sums fit in 64 bits."""
    positions = positions if positions.dim() == 3 else positions[:, None]
    if positions.dtype is not torch.int64:
        return positions.long()
    return positions.clamp(1 - UNBOUNDED, UNBOUNDED - 1)
