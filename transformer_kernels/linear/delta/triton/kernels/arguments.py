"""Kernel arguments as named tuples; see kernels/arguments.py of attention for their rules."""

# No `from __future__ import annotations`: Triton needs annotations as objects, not as strings.
from typing import NamedTuple

import triton.language as tl

from .....backends.triton import config
from ....triton.tiles import Precision, Tile
from ...types import Inputs, Options

SUB_BLOCK = 16
"""Tokens of a sub-block of a chunk, see pairs.py. A chunk has one or two."""
CHANNELS = 16
"""Gates, or channels with a gate each, that elementwise kernels take at a time."""


class Scalars(NamedTuple):
    """Arguments that change from call to call, passed to kernels as `*scalars`, so that Triton does
    not specialize on their values."""

    rows: int
    """rows in memory: the length of a dense sequence, or the total of packed ones"""
    B: int
    """number of sequences"""
    chunks: int
    """chunks of a dense sequence"""
    beta_b: int
    beta_h: int
    beta_l: int
    """strides of beta (B, H_v, T)"""
    scale: float


UNSPECIALIZED = list(Scalars._fields)


class Sizes(NamedTuple):
    """Compile-time sizes and options."""

    D: tl.constexpr
    D_V: tl.constexpr
    GATES: tl.constexpr
    """1, or D"""
    GROUP: tl.constexpr
    """value heads that share a head of q and k"""
    BLOCK_D: tl.constexpr
    BLOCK_G: tl.constexpr
    """1, or BLOCK_D"""
    CHANNELS: tl.constexpr
    """1, or those of elementwise kernels"""
    CHUNK: tl.constexpr
    SLICE: tl.constexpr
    """columns of v and of the state that a program computes at a time"""
    L2NORM: tl.constexpr
    PRECISION: tl.constexpr
    """operands of products, see `tiles.Precision`"""


def sizes(x: Inputs, tile: Tile, options: Options, precision: Precision) -> Sizes:
    D, D_v, gates = x.k.shape[3], x.v.shape[3], x.log_decay.shape[3]
    block_d, _ = config.widths(D, D_v)
    return Sizes(
        D=tl.constexpr(D),
        D_V=tl.constexpr(D_v),
        GATES=tl.constexpr(gates),
        GROUP=tl.constexpr(x.v.shape[1] // x.k.shape[1]),
        BLOCK_D=tl.constexpr(block_d),
        BLOCK_G=tl.constexpr(1 if gates == 1 else block_d),
        CHANNELS=tl.constexpr(1 if gates == 1 else CHANNELS),
        CHUNK=tl.constexpr(tile.chunk),
        SLICE=tl.constexpr(tile.slice),
        L2NORM=tl.constexpr(options.l2norm),
        PRECISION=tl.constexpr(precision),
    )
