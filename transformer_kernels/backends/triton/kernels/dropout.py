"""Dropout: its arguments, and Philox2x32-7 on 16-bit halves, docs/attention.md section 7."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ....scores import philox as host
from ....scores.options import ScoreOptions

MULTIPLIER = tl.constexpr(0xD256D193)
WEYL = tl.constexpr(0x9E3779B9)
ROUNDS = tl.constexpr(7)


class Dropout(NamedTuple):
    """A weight is kept, and multiplied by `factor`, if its 16 random bits are >= `threshold`."""

    seed: Tensor | None
    threshold: int
    factor: float
    first_row: int | None
    """row of query 0 in the larger call; None, like the next two, if the call is no part of one"""
    first_column: int | None
    first_head: int | None


def dropout(options: ScoreOptions) -> Dropout:
    p = options.dropout_p
    if not p:
        return Dropout(None, 0, 1.0, None, None, None)
    first = (options.dropout_row, options.dropout_column, options.dropout_head)
    offsets = first if any(first) else (None, None, None)
    return Dropout(options.seed, host.keep_threshold(p), host.keep_factor(p), *offsets)


@triton.jit
def philox(key, x0, x1):
    """Two 32-bit words from a counter of two words"""
    multiplier = tl.cast(MULTIPLIER, tl.uint32)
    for _ in tl.static_range(ROUNDS):
        x0, x1 = tl.umulhi(multiplier, x0) ^ key ^ x1, multiplier * x0
        key += tl.cast(WEYL, tl.uint32)
    return x0, x1


@triton.jit
def halves(word, threshold):
    """(R, C, 2) int8: 1 where the lower and the upper half of each word is at least `threshold`"""
    low, high = (word & 0xFFFF).to(tl.int32), (word >> 16).to(tl.int32)
    return tl.join((low >= threshold).to(tl.int8), (high >= threshold).to(tl.int8))


@triton.jit
def dropped(p, dropout, coords, sizes):
    """Weights p, 0 where dropped"""
    if dropout.seed is not None:
        keep = keep_mask(dropout, coords, sizes.BLOCK_M, sizes.BLOCK_N)
        p = tl.where(keep, p, 0.0)
    return p


@triton.jit
def dropout_factor(dropout, coords, sizes, TRANSPOSED: tl.constexpr):
    """z of a tile: the factor of kept weights, or 0; 1 without dropout"""
    if dropout.seed is None:
        return 1.0
    else:
        keep = keep_mask(dropout, coords, sizes.BLOCK_M, sizes.BLOCK_N)
        if TRANSPOSED:
            keep = tl.trans(keep)
        return tl.where(keep, dropout.factor, 0.0)


@triton.jit
def keep_mask(dropout, coords, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Dropout mask of a tile: bool (BLOCK_M, BLOCK_N), True = kept.

    i0 and j0 are multiples of 16. Queries i, i + 8 and keys j, j + 8 of a block of 16 x 16 share a
    counter, of two words of two halves.
    """
    seed = tl.load(dropout.seed)
    i0, j0, h = coords.i0, coords.j0, coords.h
    if dropout.first_row is not None:
        i0, j0, h = i0 + dropout.first_row, j0 + dropout.first_column, h + dropout.first_head
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    key, start = philox(low, tl.cast(h, tl.uint32), tl.cast(coords.b, tl.uint32))
    row = start + (i0 // 2 + tl.arange(0, BLOCK_M // 2)).to(tl.uint32)
    column = (j0 // 2 + tl.arange(0, BLOCK_N // 2)).to(tl.uint32)
    zero = tl.zeros([BLOCK_M // 2, BLOCK_N // 2], tl.uint32)
    w0, w1 = philox(key ^ high, zero + row[:, None], zero + column[None, :])
    bits = tl.join(halves(w0, dropout.threshold), halves(w1, dropout.threshold))
    bits = tl.reshape(bits, [BLOCK_M // 16, 8, BLOCK_N // 16, 8, 2, 2])  # ..., half, word
    bits = tl.permute(bits, [0, 5, 1, 2, 4, 3])
    return tl.reshape(bits, [BLOCK_M, BLOCK_N]) != 0
