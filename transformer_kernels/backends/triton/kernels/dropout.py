"""Dropout: its arguments, and Philox4x32-7 on 16-bit halves, docs/attention.md section 7."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ....scores import philox as host
from ....scores.options import ScoreOptions

MULTIPLIER_0 = tl.constexpr(0xD2511F53)
MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
WEYL_0 = tl.constexpr(0x9E3779B9)
WEYL_1 = tl.constexpr(0xBB67AE85)
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
def philox(seed, x0, x1, x2, x3):
    """Four 32-bit words from a counter of four words and a 64-bit seed"""
    key0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        a, b = tl.cast(MULTIPLIER_0, tl.uint32), tl.cast(MULTIPLIER_1, tl.uint32)
        y0, y2 = tl.umulhi(b, x2) ^ x1 ^ key0, tl.umulhi(a, x0) ^ x3 ^ key1
        x1, x3 = b * x2, a * x0
        x0, x2 = y0, y2
        key0 += tl.cast(WEYL_0, tl.uint32)
        key1 += tl.cast(WEYL_1, tl.uint32)
    return x0, x1, x2, x3


@triton.jit
def halves(word, threshold):
    """(M, C, 2) int8: 1 where the lower and the upper half of each word is at least `threshold`"""
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

    j0 must be a multiple of BLOCK_N. 64 keys share 8 counters of 4 words of 2 halves: key
    64 n + 16 word + 8 half + c uses counter 8 n + c. A block of 32 keys uses two words of each of
    its 8 counters, a block of 16 keys one.
    """
    seed = tl.load(dropout.seed)
    i0, j0, h = coords.i0, coords.j0, coords.h
    if dropout.first_row is not None:
        i0, j0, h = i0 + dropout.first_row, j0 + dropout.first_column, h + dropout.first_head
    COUNTERS: tl.constexpr = max(BLOCK_N // 8, 8)
    zero = tl.zeros([BLOCK_M, COUNTERS], tl.uint32)
    counter = (j0 // 64 * 8 + tl.arange(0, COUNTERS)).to(tl.uint32)
    row = (i0 + tl.arange(0, BLOCK_M)).to(tl.uint32)
    w0, w1, w2, w3 = philox(
        seed,
        zero + counter[None, :],
        zero + row[:, None],
        zero + tl.cast(h, tl.uint32),
        zero + tl.cast(coords.b, tl.uint32),
    )
    threshold = dropout.threshold
    if BLOCK_N >= 64:
        # (M, counter, half, word): tl.join appends the new dimension.
        even = tl.join(halves(w0, threshold), halves(w2, threshold))
        odd = tl.join(halves(w1, threshold), halves(w3, threshold))
        bits = tl.reshape(tl.join(even, odd), [BLOCK_M, BLOCK_N // 64, 8, 2, 2, 2])
        # (M, n, c, half, word >> 1, word & 1) -> (M, n, word >> 1, word & 1, half, c)
        bits = tl.permute(bits, [0, 1, 4, 5, 3, 2])
    elif BLOCK_N == 32:
        second = (j0 // 32) % 2 == 1
        even, odd = tl.where(second, w2, w0), tl.where(second, w3, w1)
        bits = tl.join(halves(even, threshold), halves(odd, threshold))
        bits = tl.permute(bits, [0, 3, 2, 1])
    else:
        tl.static_assert(BLOCK_N == 16, "a block of keys is 16, 32 or a multiple of 64")
        word = (j0 // 16) % 4
        lower, upper = tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3)
        bits = tl.permute(halves(tl.where(word < 2, lower, upper), threshold), [0, 2, 1])
    return tl.reshape(bits, [BLOCK_M, BLOCK_N]) != 0
