"""Kernel arguments as named tuples; see kernels/arguments.py of attention for their rules."""

# No `from __future__ import annotations`: Triton needs annotations as objects, not as strings.
from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from ....backends.triton import config
from ...types import Inputs, Options
from ..tiles import Precision, Tile


class Scalars(NamedTuple):
    """Arguments that change from call to call, passed to kernels as `*scalars`, so that Triton does
    not specialize on their values."""

    rows: int
    """rows in memory: the length of a dense sequence, or the total of packed ones"""
    B: int
    """number of sequences"""
    segment: int
    """tokens of a segment, a multiple of CHUNK"""
    segments: int
    """segments of a dense sequence"""
    decay_b: int
    decay_h: int
    decay_l: int
    """strides of log_decay (B, H_kv, N)"""
    eps: float


UNSPECIALIZED = list(Scalars._fields)


class KeyRange(NamedTuple):
    """Visible keys start[b] <= j < end[b], (B) int64. None: from 0; every key."""

    start: Tensor | None
    end: Tensor | None


class States(NamedTuple):
    """Contiguous float32 S (n, H_kv, D, D_v) and z (n, H_kv, D); None: zeros, or not wanted."""

    S: Tensor | None
    z: Tensor | None


class Statistics(NamedTuple):
    """Per query, contiguous (B, H_q, M) float32; None if the call is not normalized."""

    normalizer: Tensor | None
    """l, which contains eps"""
    delta: Tensor | None
    """do . o"""


class Sizes(NamedTuple):
    """Compile-time sizes and options."""

    D: tl.constexpr
    D_V: tl.constexpr
    BLOCK_D: tl.constexpr
    BLOCK_DV: tl.constexpr
    CHUNK: tl.constexpr
    SLICE: tl.constexpr
    """columns of c that a program computes"""
    FEATURES: tl.constexpr
    """index of the feature map in linear/types.py"""
    CAUSAL: tl.constexpr
    NORMALIZE: tl.constexpr
    DECAYED: tl.constexpr
    """True if log_decay is given"""
    PRECISION: tl.constexpr
    """operands of products, see `tiles.Precision`"""


def sizes(x: Inputs, tile: Tile, options: Options, precision: Precision) -> Sizes:
    feature_map, *_ = options.pack()
    D, D_v = x.k.shape[3], x.v.shape[3]
    return Sizes(
        D=tl.constexpr(D),
        D_V=tl.constexpr(D_v),
        BLOCK_D=tl.constexpr(config.width(D)),
        BLOCK_DV=tl.constexpr(config.width(D_v)),
        CHUNK=tl.constexpr(tile.chunk),
        SLICE=tl.constexpr(tile.slice),
        FEATURES=tl.constexpr(feature_map),
        CAUSAL=tl.constexpr(options.causal),
        NORMALIZE=tl.constexpr(options.normalize),
        DECAYED=tl.constexpr(x.log_decay is not None),
        PRECISION=tl.constexpr(precision),
    )
