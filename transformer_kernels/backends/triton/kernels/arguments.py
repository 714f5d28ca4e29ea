"""Kernel arguments of every option, as named tuples, with the host functions that build them.

Triton passes a tuple field by field and specializes the kernel on the fields that are None or
`tl.constexpr`, so an absent tensor costs nothing at run time. Tuples are not nested: Triton 3.6
loses fields of nested tuples that are None or 1.
"""

# No `from __future__ import annotations`: Triton needs annotations as objects, not as strings.
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ....masks.resolved import BLOCK_MASK_SIZE
from ....problem import Problem
from .. import config
from ..config import Tile


class Rows(NamedTuple):
    """(B, H, L, width) tensor with unit-stride rows; strides in elements."""

    data: Tensor
    stride_b: int
    stride_h: int
    stride_l: int


class Scalars(NamedTuple):
    """Arguments that change from call to call, passed to kernels as `*scalars`: Triton specializes
    on the fields of a tuple, even if the tuple is exempt."""

    rows: int
    """rows of q in memory: M, or the total of a varlen call"""
    M: int
    N: int
    low: int
    high: int
    """band: i + low <= j <= i + high is visible"""
    offset: int
    """added to i in the ALiBi distance |i + offset - j|"""
    rows_k: int
    """rows of k and v in memory: N, or the total of a varlen call. In pages they have no limit."""


UNSPECIALIZED = list(Scalars._fields)
"""Kernel arguments that are exempt from Triton's specialization. Otherwise a value of 1 or a
multiple of 16 would compile another kernel."""


class Heads(NamedTuple):
    """Number of query heads, and of query heads per key head."""

    H_q: int
    group: int


class Sequences(NamedTuple):
    """Varlen sequences: b has query rows cu_q[b]..cu_q[b + 1] and key rows cu_k[b]..cu_k[b + 1].
    None for caches."""

    cu_q: Tensor | None
    cu_k: Tensor | None
    bottom_right: int
    """1 if the band and ALiBi are relative to the bottom right corner of each sequence, else 0"""


class Sizes(NamedTuple):
    """Compile-time sizes: widths, tile, and the grains of the block lists."""

    D: tl.constexpr
    D_V: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_D: tl.constexpr
    BLOCK_DV: tl.constexpr
    ROW_GRAIN: tl.constexpr
    """rows per entry of a block list, see `grains`"""
    KEY_GRAIN: tl.constexpr
    PRECISION: tl.constexpr
    """`input_precision` of float32 products"""


def rows(x: Tensor) -> Rows:
    return Rows(x, *x.stride()[:3])


def scalars(problem: Problem, q: Tensor, k: Tensor) -> Scalars:
    M, N, mask = problem.shape.M, problem.shape.N, problem.mask
    limit = M + N  # beyond every index, with either alignment
    shift = N - M if mask.bottom_right and problem.layout.kind == "dense" else 0
    return Scalars(
        rows=q.shape[2],
        M=M,
        N=N,
        low=min(max(mask.diagonal_low + shift, -limit), limit),
        high=min(max(mask.diagonal_high + shift, -limit), limit),
        offset=problem.scores.alibi_offset + shift,
        rows_k=(1 << 31) - 1 if problem.layout.has_packed_pages else k.shape[2],
    )


def sequences(problem: Problem) -> Sequences:
    layout = problem.layout
    bottom_right = problem.mask.bottom_right and layout.kind != "dense"  # see `scalars`
    return Sequences(layout.cu_seqlens_q, layout.cu_seqlens_k, int(bottom_right))


def grains(tile: Tile) -> tuple[int, int]:
    """Returns the rows and keys per entry of a block list: those of the tile or, if larger, of the
    block mask."""
    return max(tile.block_m, BLOCK_MASK_SIZE), max(tile.block_n, BLOCK_MASK_SIZE)


def sizes(D: int, D_v: int, tile: Tile, precision: str) -> Sizes:
    row_grain, key_grain = grains(tile)
    block_d, block_dv = config.widths(D, D_v)
    return Sizes(
        D=tl.constexpr(D),
        D_V=tl.constexpr(D_v),
        BLOCK_M=tl.constexpr(tile.block_m),
        BLOCK_N=tl.constexpr(tile.block_n),
        BLOCK_D=tl.constexpr(block_d),
        BLOCK_DV=tl.constexpr(block_dv),
        ROW_GRAIN=tl.constexpr(row_grain),
        KEY_GRAIN=tl.constexpr(key_grain),
        PRECISION=tl.constexpr(precision),
    )


def broadcast_strides(x: Tensor | None, dimensions: int) -> Sequence[int | None]:
    """Returns the strides of x, 0 for dimensions of size 1; None for each dimension of None."""
    if x is None:
        return [None] * dimensions
    return [0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def as_uint8(x: Tensor | None) -> Tensor | None:
    """Returns a view of a bool tensor as uint8."""
    return None if x is None else x.view(torch.uint8)
