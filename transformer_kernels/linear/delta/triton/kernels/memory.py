"""Positions of tokens; loads and stores of rows, states and squares of a chunk."""

import triton
import triton.language as tl

from ....triton.kernels.memory import load_slice, matrix_addresses
from ....triton.kernels.segments import Chunk

NORM_EPS = tl.constexpr(1e-6)
"""NORM_EPS of linear/delta/types.py"""


@triton.jit
def rows_of(at, first, ROWS: tl.constexpr):
    """Tokens first to first + ROWS of a sequence"""
    i = first + tl.arange(0, ROWS)
    inside = i < at.tokens
    return Chunk(at.memory_b, at.first + first, i, inside, inside)


@triton.jit
def last_row(at, end):
    """The last token before `end`, or the first one"""
    return rows_of(at, tl.maximum(tl.minimum(end, at.tokens) - 1, 0), 1)


@triton.jit
def load_unit(x, chunk, h, sizes):
    """Rows of q or k in float32, divided by their lengths if L2NORM; and 1 / length"""
    y = load_slice(x, chunk, h, chunk.inside, 0, sizes.D, sizes.BLOCK_D).to(tl.float32)
    if sizes.L2NORM:
        inverse = 1.0 / tl.sqrt(tl.sum(y * y, 1) + NORM_EPS)
        return y * inverse[:, None], inverse
    else:
        return y, 1.0


@triton.jit
def load_unit_slice(x, chunk, h, column, WIDTH: tl.constexpr, sizes):
    """WIDTH columns of the same rows"""
    y = load_slice(x, chunk, h, chunk.inside, column, sizes.D, WIDTH).to(tl.float32)
    if sizes.L2NORM:
        _, inverse = load_unit(x, chunk, h, sizes)
        y *= inverse[:, None]
    return y


@triton.jit
def load_values(x, chunk, h, column, sizes):
    """SLICE columns of rows of v's width in float32"""
    return load_slice(x, chunk, h, chunk.inside, column, sizes.D_V, sizes.SLICE).to(tl.float32)


@triton.jit
def load_beta(beta, chunk, h, beta_b, beta_h, beta_l):
    """beta of the tokens; 0 beyond the last one"""
    row = tl.cast(chunk.row, tl.int64) + tl.arange(0, chunk.i.shape[0])
    at = beta + tl.cast(chunk.b, tl.int64) * beta_b + tl.cast(h, tl.int64) * beta_h + row * beta_l
    return tl.load(at, mask=chunk.inside, other=0.0)


@triton.jit
def load_matrix(S, n, h, heads, column, sizes):
    """SLICE columns of state n of head h"""
    at, mask = matrix_addresses(S, n, h, heads, column, sizes.BLOCK_D, sizes.SLICE, sizes, False)
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def store_matrix(S, n, h, heads, column, tile, sizes):
    at, mask = matrix_addresses(S, n, h, heads, column, sizes.BLOCK_D, sizes.SLICE, sizes, False)
    tl.store(at, tile, mask=mask)


@triton.jit
def square(
    x, n, h, heads, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr
):
    """Pointers to a tile of the pairs of chunk n, x (chunks, heads, CHUNK, CHUNK)"""
    i, j = row + tl.arange(0, ROWS)[:, None], column + tl.arange(0, COLUMNS)[None, :]
    return x + (tl.cast(n, tl.int64) * heads.H_q + h) * (CHUNK * CHUNK) + (i * CHUNK + j)


@triton.jit
def load_square(x, n, h, heads, CHUNK: tl.constexpr):
    return tl.load(square(x, n, h, heads, 0, 0, CHUNK, CHUNK, CHUNK))


@triton.jit
def store_square(x, n, h, heads, tile, CHUNK: tl.constexpr):
    tl.store(square(x, n, h, heads, 0, 0, CHUNK, CHUNK, CHUNK), tile)
