"""Addresses, loads and stores, and the position of a program and of a tile."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Head(NamedTuple):
    """Rows of one head: pointer to the first one, their stride, and that of batch entries or of
    pages."""

    data: Any
    stride: Any
    entry_stride: Any


class TileCoords(NamedTuple):
    """Position of a tile of scores.

    i (queries) and j (keys) broadcast to the tile: (BLOCK_M, 1) with (1, BLOCK_N), or (1, BLOCK_M)
    with (BLOCK_N, 1) if it is transposed.
    """

    b: Any
    h: Any
    i0: Any
    j0: Any
    i: Any
    j: Any


@triton.jit
def tile_coords(b, h, i0, j0, sizes, TRANSPOSED: tl.constexpr):
    i, j = i0 + tl.arange(0, sizes.BLOCK_M), j0 + tl.arange(0, sizes.BLOCK_N)
    if TRANSPOSED:
        return TileCoords(b, h, i0, j0, i[None, :], j[:, None])
    else:
        return TileCoords(b, h, i0, j0, i[:, None], j[None, :])


@triton.jit
def program_head(blocks, heads):
    """(head, batch index) of this program; there are `blocks` programs for each head"""
    row = tl.program_id(0) // blocks
    return row % heads, row // heads


@triton.jit
def sequence(sequences, b, M, N, rows, rows_k):
    """(batch index in memory, first query row, first key row, M, N) of sequence b"""
    if sequences.cu_q is None:
        return b, 0, 0, M, N
    else:
        first_q, M = sequence_rows(sequences.cu_q + b, rows)
        first_k, N = sequence_rows(sequences.cu_k + b, rows_k)
        return 0, first_q, first_k, M, N


@triton.jit
def sequence_rows(starts, rows):
    """(first row, number of rows) of a sequence. The offsets are on the device and not validated:
    clamped to the rows in memory."""
    first = tl.minimum(tl.maximum(tl.load(starts), 0), rows)
    return first, tl.maximum(tl.minimum(tl.load(starts + 1), rows) - first, 0)


@triton.jit
def head(rows, b, h, first):
    """`Head` from row `first` on; 64-bit offsets"""
    data = (
        rows.data
        + tl.cast(b, tl.int64) * rows.stride_b
        + tl.cast(h, tl.int64) * rows.stride_h
        + tl.cast(first, tl.int64) * rows.stride_l
    )
    return Head(data, rows.stride_l, rows.stride_b)


@triton.jit
def vector_pointer(data, heads, rows, b, h, first):
    """Pointer to element `first` of head h in a contiguous (B, H_q, rows) tensor"""
    return data + (tl.cast(b, tl.int64) * heads.H_q + h) * rows + first


@triton.jit
def load_rows(
    head, first, in_bounds, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr
):
    """Tile of BLOCK columns from row `first` of a head. Columns beyond WIDTH are 0; if CHECKED,
    rows that are not `in_bounds` are 0 too."""
    at = tile_addresses(head, first, in_bounds.shape[0], BLOCK)
    return load_tile(at, in_bounds, WIDTH, CHECKED)


@triton.jit
def load_tile(at, in_bounds, WIDTH: tl.constexpr, CHECKED: tl.constexpr):
    """Tile at these addresses, with zeros as in `load_rows`"""
    BLOCK: tl.constexpr = at.shape[1]
    columns = tl.arange(0, BLOCK)[None, :] < WIDTH
    if CHECKED:
        if WIDTH == BLOCK:
            return tl.load(at, mask=in_bounds[:, None], other=0.0)
        else:
            return tl.load(at, mask=in_bounds[:, None] & columns, other=0.0)
    else:
        if WIDTH == BLOCK:
            return tl.load(at)
        else:
            return tl.load(at, mask=columns, other=0.0)


@triton.jit
def store_rows(head, first, in_bounds, tile, WIDTH: tl.constexpr):
    """Stores the first WIDTH columns of the tile's rows that are `in_bounds`"""
    at = tile_addresses(head, first, tile.shape[0], tile.shape[1])
    columns = tl.arange(0, tile.shape[1])[None, :] < WIDTH
    tl.store(at, tile.to(head.data.dtype.element_ty), mask=in_bounds[:, None] & columns)


@triton.jit
def tile_addresses(head, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, COLUMNS) pointers: a scalar base, which is all a loop advances, plus fixed offsets"""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    return head.data + tl.cast(first, tl.int64) * head.stride + (row * head.stride + column)
