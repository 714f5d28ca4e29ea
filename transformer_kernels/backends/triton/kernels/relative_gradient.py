"""Gradient of a relative bias: ds, summed over the elements of each distance i - j.

A program sums the tiles of one strip: those with the same i0 - j0 = strip T, where T is the side of
a tile. Elements at the same place in such tiles have the same distance, strip T + r - u in row r
and column u. The tiles are added element by element, and their sum is added up along its diagonals
once. Distances that are not a multiple of T lie in two strips: `sums` has a row for either.

Sums run in a fixed order, without atomics. docs/attention.md, section 3.
"""

import triton
import triton.language as tl

from .arguments import UNSPECIALIZED
from .block_lists import is_empty
from .masks import sequence_band
from .primitives import program_head, sequence, tile_coords
from .score_gradient import tile_gradients
from .scores import is_distance


@triton.jit(do_not_specialize=UNSPECIALIZED)
def strip_sums_kernel(
    q, k, v, do, statistics, sums,
    rows, M, N, low, high, offset, rows_k,
    heads, sequences, mask, block_mask, block_strides, scores, dropout, sizes,
):  # fmt: skip
    """sums (B, H_q, 2, distances) float32, initially 0: ds of a strip by distance, that of
    diagonals r >= u of its tiles in the first row and of the others in the second"""
    SIDE: tl.constexpr = sizes.BLOCK_M
    tl.static_assert(sizes.BLOCK_N == SIDE, "tiles of a strip are square")
    column_blocks = tl.cdiv(N, SIDE)
    strips = tl.cdiv(M, SIDE) + column_blocks - 1
    h, b = program_head(strips, heads.H_q)
    memory_b, first_q, first_k, own_M, own_N = sequence(sequences, b, M, N, rows, rows_k)
    band = sequence_band(mask, sequences, b, M, N, own_M, own_N, low, high, offset)
    strip = tl.program_id(0) % strips - (column_blocks - 1)
    begin, end = strip_blocks(band, strip, SIDE)
    if begin >= end:
        return

    total = tl.zeros([SIDE, SIDE], tl.float32)
    for n in range(begin, end):
        i0, j0 = n * SIDE, (n - strip) * SIDE
        if not is_empty(block_mask, block_strides, b, h, i0, j0):
            coords = tile_coords(b, h, i0, j0, sizes, TRANSPOSED=False)
            tile = tile_gradients(
                q, k, v, do, statistics, rows, heads, memory_b, first_q, first_k,
                coords, band, mask, scores, dropout, sizes,
            )  # fmt: skip
            total += tile.ds
    lower, upper = diagonal_sums(total, SIDE)
    row = (tl.cast(b, tl.int64) * heads.H_q + h) * 2 * band.distances
    index = band.relative_offset + strip * SIDE + tl.arange(0, SIDE)
    tl.store(sums + row + index, lower, mask=is_distance(index, band))
    index -= SIDE
    tl.store(sums + row + band.distances + index, upper, mask=is_distance(index, band))


@triton.jit
def strip_blocks(band, strip, SIDE: tl.constexpr):
    """First and last query block + 1 of the tiles of a strip that the band and its key range leave
    partially visible"""
    begin = tl.maximum(strip + band.begin // SIDE, 0)
    end = tl.minimum(strip + tl.cdiv(band.end, SIDE), tl.cdiv(band.M, SIDE))
    # j - i is at least -SIDE * strip - (SIDE - 1), and at most -SIDE * strip + SIDE - 1.
    if (SIDE - 1 - SIDE * strip < band.low) | (1 - SIDE - SIDE * strip > band.high):
        end = begin
    return begin, end


@triton.jit
def diagonal_sums(tile, SIDE: tl.constexpr):
    """Sums of a square tile along its diagonals: element t of the first vector is that of
    r - u = t, of the second that of r - u = t - SIDE"""
    r, t = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    skewed = tl.gather(tile, (r - t) & (SIDE - 1), axis=1)  # SIDE is a power of 2
    lower, upper = tl.where(r >= t, skewed, 0.0), tl.where(r < t, skewed, 0.0)
    return tl.sum(lower, 0), tl.sum(upper, 0)
