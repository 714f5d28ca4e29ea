"""Loads and stores: slices of rows, features, and states."""

import triton
import triton.language as tl

from ....backends.triton.kernels.primitives import Head, head, tile_addresses
from .arithmetic import features


@triton.jit
def slice_addresses(x, chunk, h, column, BLOCK: tl.constexpr):
    """Pointers to a tile of BLOCK columns of head h, from `column` on"""
    of_head = head(x, chunk.b, h, chunk.row)
    of_slice = Head(of_head.data + column, of_head.stride, of_head.entry_stride)
    return tile_addresses(of_slice, 0, chunk.i.shape[0], BLOCK)


@triton.jit
def load_slice(x, chunk, h, live, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Tile of BLOCK columns from `column` on. Rows that are not live and columns beyond WIDTH are
    0; they are not loaded."""
    at = slice_addresses(x, chunk, h, column, BLOCK)
    if WIDTH % BLOCK == 0:
        return tl.load(at, mask=live[:, None], other=0.0)
    else:
        columns = column + tl.arange(0, BLOCK) < WIDTH
        return tl.load(at, mask=live[:, None] & columns[None, :], other=0.0)


@triton.jit
def load_features(x, chunk, h, live, column, BLOCK: tl.constexpr, sizes):
    """phi of a tile of q or k; 0 where nothing is loaded"""
    y = features(load_slice(x, chunk, h, live, column, sizes.D, BLOCK), sizes)
    if sizes.D % BLOCK == 0:
        return tl.where(live[:, None], y, 0.0)
    else:
        columns = column + tl.arange(0, BLOCK) < sizes.D
        return tl.where(live[:, None] & columns[None, :], y, 0.0)


@triton.jit
def load_operand(x, chunk, h, live, sizes, OF_VALUES: tl.constexpr):
    """Rows of v or do if OF_VALUES, else phi of rows of q or k; all columns"""
    if OF_VALUES:
        return load_slice(x, chunk, h, live, 0, sizes.D_V, sizes.BLOCK_DV)
    else:
        return load_features(x, chunk, h, live, 0, sizes.BLOCK_D, sizes)


@triton.jit
def store_slice(x, chunk, h, column, tile, WIDTH: tl.constexpr):
    """Stores the tile's rows of existing tokens, up to column WIDTH of x"""
    at = slice_addresses(x, chunk, h, column, tile.shape[1])
    columns = column + tl.arange(0, tile.shape[1]) < WIDTH
    tl.store(at, tile.to(x.data.dtype.element_ty), mask=chunk.inside[:, None] & columns[None, :])


@triton.jit
def matrix_addresses(
    S, n, h, heads, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, sizes,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Pointers to a tile of S (D, D_v), or of its transpose, from `column` on; and its mask"""
    row = tl.arange(0, ROWS)[:, None]
    column = (column + tl.arange(0, COLUMNS))[None, :]
    number = tl.cast(n, tl.int64) * (heads.H_q // heads.group) + h
    at = S + number * (sizes.D * sizes.D_V)
    if TRANSPOSED:
        return at + (column * sizes.D_V + row), (row < sizes.D_V) & (column < sizes.D)
    else:
        return at + (row * sizes.D_V + column), (row < sizes.D) & (column < sizes.D_V)


@triton.jit
def vector_addresses(z, n, h, heads, column, COLUMNS: tl.constexpr, sizes):
    """Pointers to elements of z (D) from `column` on; and their mask"""
    column = column + tl.arange(0, COLUMNS)
    number = tl.cast(n, tl.int64) * (heads.H_q // heads.group) + h
    return z + number * sizes.D + column, column < sizes.D


@triton.jit
def load_state(states, n, h, heads, column, sizes, TRANSPOSED: tl.constexpr):
    """(T, u) of a result, from `column` on: S and all of z, or S^T and a slice of z if TRANSPOSED.
    Zeros if the state is None."""
    ROWS: tl.constexpr = sizes.BLOCK_DV if TRANSPOSED else sizes.BLOCK_D
    LENGTH: tl.constexpr = sizes.SLICE if TRANSPOSED else sizes.BLOCK_D
    T = tl.zeros([ROWS, sizes.SLICE], tl.float32)
    u = tl.zeros([LENGTH], tl.float32)
    if states.S is not None:
        at, mask = matrix_addresses(
            states.S, n, h, heads, column, ROWS, sizes.SLICE, sizes, TRANSPOSED
        )
        T = tl.load(at, mask=mask, other=0.0)
    if states.z is not None:
        at_z, in_z = vector_addresses(
            states.z, n, h, heads, column if TRANSPOSED else 0, LENGTH, sizes
        )
        u = tl.load(at_z, mask=in_z, other=0.0)
    return T, u


@triton.jit
def store_state(states, n, h, heads, column, S, z, sizes):
    """Stores S, from `column` on, and z: those parts of the state that are not None"""
    if states.S is not None:
        at, mask = matrix_addresses(
            states.S, n, h, heads, column, S.shape[0], sizes.SLICE, sizes, False
        )
        tl.store(at, S, mask=mask)
    if states.z is not None:
        at_z, in_z = vector_addresses(states.z, n, h, heads, 0, z.shape[0], sizes)
        if column == 0:
            tl.store(at_z, z, mask=in_z)
