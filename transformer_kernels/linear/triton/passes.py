"""One call of linear attention: its tensors, sizes and segments, and the memory it allocates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...backends.schema import empty_like_layout
from ...backends.triton import target
from ...backends.triton.kernels.arguments import Heads, contiguous
from ...backends.triton.launch import as_rows
from ..types import Inputs, Options
from . import tiles
from .kernels import arguments
from .kernels.arguments import KeyRange, Scalars
from .tiles import Tile

MOST_STATE_COLUMNS = 64
"""Columns of a state in the registers of one program, at most; it holds all rows."""


@dataclass(frozen=True)
class Segments:
    """Segments of the rows of q, or of k and v; kernels/segments.py has their numbers."""

    rows: int
    """rows in memory: of a sequence, or of all packed ones"""
    tokens: int
    """tokens of a segment"""
    count: int
    """segments of a dense sequence"""
    programs: int
    """numbers of segments"""
    boundaries: int
    """numbers of boundaries"""

    @property
    def are_several(self) -> bool:
        """True if a sequence can have more than one segment."""
        return self.tokens < self.rows


class Pass(NamedTuple):
    """Inputs of one pass, with unit-stride rows, and the kernel arguments made from its options."""

    x: Inputs
    options: Options
    B: int
    """number of sequences"""
    tile: Tile
    sizes: arguments.Sizes
    heads: Heads
    keys: KeyRange

    @property
    def H_kv(self) -> int:
        return self.x.k.shape[1]

    @property
    def state_slice(self) -> int:
        """Columns of a state that a program sums."""
        return min(self.tile.slice, MOST_STATE_COLUMNS)

    @property
    def state_sizes(self) -> arguments.Sizes:
        return self.sizes._replace(SLICE=tl.constexpr(self.state_slice))

    @property
    def is_packed(self) -> bool:
        return self.x.cu_seqlens is not None

    def segments(self, rows: int, *, by_chunk: bool = False) -> Segments:
        """Returns the segments of `rows`: `tiles.segment` tokens each, or a chunk."""
        B, columns = self.B, max(self.x.k.shape[3], self.x.v.shape[3])
        tokens = self.tile.chunk if by_chunk else tiles.segment(columns)
        count = max(1, blocks(rows, tokens))
        if self.is_packed:
            numbers = rows // tokens + 2 * B if B else 0
            return Segments(rows, tokens, count, programs=numbers, boundaries=numbers)
        return Segments(rows, tokens, count, programs=B * count, boundaries=B * (count + 1))

    def scalars(self, segments: Segments) -> Scalars:
        decay = self.x.log_decay
        b, h, n = (0, 0, 0) if decay is None else decay.stride()
        return Scalars(
            segments.rows, self.B, segments.tokens, segments.count, b, h, n, self.options.eps
        )

    def output(self, like: Tensor, width: int) -> Tensor:
        """Allocates (B, H, L, width): zeros for packed rows, whose trailing padding is not written,
        else uninitialized."""
        y = empty_like_layout(like, width)
        return y.zero_() if self.is_packed else y

    def row_sums(self, like: Tensor, *leading: int) -> Tensor:
        """Allocates (*leading, B, H, L) in float32, uninitialized."""
        return like.new_empty((*leading, *like.shape[:3]), dtype=torch.float32)

    @property
    def operand_dtype(self) -> torch.dtype:
        """dtype of S at boundaries: bfloat16 if products would round it to that."""
        return torch.bfloat16 if self.sizes.PRECISION.value == "bf16" else torch.float32

    def states(self, count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Allocates S in `dtype` and z in float32, of `count` states of every key head,
        uninitialized."""
        D, D_v = self.x.k.shape[3], self.x.v.shape[3]
        S = self.x.q.new_empty((count, self.H_kv, D, D_v), dtype=dtype)
        return S, S.new_empty((count, self.H_kv, D), dtype=torch.float32)


def blocks(size: int, block: int) -> int:
    """Returns the number of blocks that cover `size`."""
    return -(-size // block)


def prepare(x: Inputs, options: Options, *, log_decay_needs_grad: bool = False) -> Pass:
    q, k, v = map(as_rows, x[:3])
    x = x._replace(
        q=q, k=k, v=v, S=contiguous(x.S), z=contiguous(x.z), cu_seqlens=contiguous(x.cu_seqlens)
    )
    chip, columns = target.chip(q.device), max(k.shape[3], v.shape[3])
    precision = tiles.precision(chip, q.dtype, log_decay_needs_grad=log_decay_needs_grad)
    tile = tiles.tile(chip, columns, precision)
    return Pass(
        x,
        options,
        q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1,
        tile,
        arguments.sizes(x, tile, options, precision),
        Heads(q.shape[1], q.shape[1] // k.shape[1]),
        KeyRange(contiguous(x.key_start), contiguous(x.key_end)),
    )
