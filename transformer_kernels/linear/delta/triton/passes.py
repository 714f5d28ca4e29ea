"""One call of the gated delta rule: its tensors and sizes, and the memory it allocates."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....backends.schema import empty_like_layout
from ....backends.triton import target
from ....backends.triton.kernels.arguments import Heads, Rows, contiguous, rows
from ....backends.triton.launch import as_rows
from ...triton.passes import blocks
from ...triton.tiles import Precision, Tile
from ..types import Inputs, Options
from . import tiles
from .kernels import arguments
from .kernels.arguments import SUB_BLOCK, Scalars


class Pass(NamedTuple):
    """Inputs of one pass, with unit-stride rows, and the kernel arguments made from its options."""

    x: Inputs
    B: int
    """number of sequences"""
    tile: Tile
    programs: int
    """numbers of chunks, see kernels/segments.py of linear attention"""
    boundaries: int
    """numbers of boundaries of chunks"""
    scalars: Scalars
    heads: Heads
    """heads of v, each with a state"""
    sizes: arguments.Sizes
    solve: arguments.Sizes
    """`sizes` with the precision of the triangular inverse"""

    @property
    def slices(self) -> int:
        """Slices of the columns of v."""
        return blocks(self.x.v.shape[3], self.tile.slice)

    @property
    def sub_blocks(self) -> int:
        """Numbers of sub-blocks of chunks, see kernels/pairs.py."""
        return self.programs * (self.tile.chunk // SUB_BLOCK)

    def output(self, like: Tensor) -> Tensor:
        """Allocates a result: zeros for packed rows, whose trailing padding is not written, else
        uninitialized."""
        y = empty_like_layout(like, like.shape[3])
        return y.zero_() if self.x.cu_seqlens is not None else y

    def contiguous(self, like: Tensor) -> Tensor:
        """Allocates a result with this shape, like `output`, but contiguous."""
        new = like.new_empty if self.x.cu_seqlens is None else like.new_zeros
        return new(like.shape)

    def rows(self, width: int) -> Rows:
        """Allocates float32 (entries, H_v, T, width), uninitialized. Its strides are multiples of
        16, whatever T is: Triton compiles a kernel for those that are, and one for others."""
        entries, H_v, T, _ = self.x.v.shape
        shape = entries, H_v, 16 * blocks(T, 16), width
        return rows(self.x.v.new_empty(shape, dtype=torch.float32))

    def squares(self) -> Tensor:
        """Allocates numbers of the pairs of each chunk, uninitialized."""
        chunk = self.tile.chunk
        shape = (self.boundaries, self.heads.H_q, chunk, chunk)
        return self.x.v.new_empty(shape, dtype=torch.float32)

    def states(self, count: int) -> Tensor:
        """Allocates `count` states of every head, uninitialized."""
        shape = (count, self.heads.H_q, self.x.k.shape[3], self.x.v.shape[3])
        return self.x.v.new_empty(shape, dtype=torch.float32)


def prepare(x: Inputs, options: Options) -> Pass:
    q, k, v, log_decay = map(as_rows, x[:4])
    x = x._replace(
        q=q, k=k, v=v, log_decay=log_decay, S=contiguous(x.S), cu_seqlens=contiguous(x.cu_seqlens)
    )
    chip, columns = target.chip(q.device), max(k.shape[3], v.shape[3])
    precision = tiles.precision(chip, q.dtype)
    tile = tiles.tile(chip, columns, precision, channels=log_decay.shape[3] > 1)
    T, B = v.shape[2], v.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    chunks = max(1, blocks(T, tile.chunk))
    programs, boundaries = B * chunks, B * (chunks + 1)
    if x.cu_seqlens is not None:
        programs = boundaries = T // tile.chunk + 2 * B if B else 0

    beta_b, beta_h, beta_l = x.beta.stride()

    def sizes(precision: Precision) -> arguments.Sizes:
        return arguments.sizes(x, tile, options, precision)

    return Pass(
        x,
        B,
        tile,
        programs,
        boundaries,
        Scalars(T, B, chunks, beta_b, beta_h, beta_l, options.scale),
        Heads(v.shape[1], 1),
        sizes(precision),
        sizes(tiles.solve_precision(chip)),
    )
