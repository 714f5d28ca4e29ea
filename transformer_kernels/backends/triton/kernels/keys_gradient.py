"""Gradient of relative keys: da q, summed over the pairs of each distance.

A program sums one block of distances. The pairs of a query block that have these distances lie in
two neighbouring tiles, or three if a packed sequence begins at another distance. Scores are
recomputed; sums run in a fixed order, without atomics. docs/attention.md, section 3.
"""

import triton
import triton.language as tl

from .arguments import UNSPECIALIZED
from .block_lists import is_empty
from .masks import sequence_band
from .primitives import sequence, tile_coords
from .score_gradient import tile_gradients
from .scores import product_gradients


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "B", "own_h", "splits"])
def distance_sums_kernel(
    q, k, v, do, statistics, sums,
    rows, M, N, low, high, offset, rows_k,
    heads, sequences, mask, block_mask, block_strides, scores, dropout, B, own_h, splits, sizes,
):  # fmt: skip
    """sums (splits, own_h, M + N - 1, D) float32, own_h = H_q or 1: each split has its share of
    the batch entries and of the heads that share the keys"""
    SIDE: tl.constexpr = sizes.BLOCK_M
    tl.static_assert(sizes.BLOCK_N == SIDE, "tiles with relative keys are square")
    # Distance 0 of a dense call begins a block: two tiles per query block, not three.
    past_blocks = tl.cdiv(N - 1, SIDE)
    blocks = past_blocks + tl.cdiv(M, SIDE)
    part = tl.program_id(0) // blocks
    first = N - 1 + (tl.program_id(0) % blocks - past_blocks) * SIDE
    shared = heads.H_q // own_h
    total = tl.zeros([SIDE, sizes.BLOCK_D], tl.float32)
    for n in range(part // own_h, B * shared, splits):
        b, h = n // shared, part % own_h + n % shared
        memory_b, first_q, first_k, own_M, own_N = sequence(sequences, b, M, N, rows, rows_k)
        band = sequence_band(mask, sequences, b, M, N, own_M, own_N, low, high, offset)
        d = band.relative_offset - first  # j - i is d in the first distance, then descends
        i_begin, i_end = query_blocks(band, d, SIDE)
        for row in range(i_begin, i_end):
            i0 = row * SIDE
            j_begin, j_end = key_blocks(band, i0 + d, SIDE)
            for column in range(j_begin, j_end):
                j0 = column * SIDE
                if not is_empty(block_mask, block_strides, b, h, i0, j0):
                    coords = tile_coords(b, h, i0, j0, sizes, TRANSPOSED=False)
                    tile = tile_gradients(
                        q, k, v, do, statistics, rows, heads, memory_b, first_q, first_k,
                        coords, band, mask, scores, dropout, sizes,
                    )  # fmt: skip
                    total = add_distances(total, tile, i0 + d - j0, scores, sizes)
    index, column = first + tl.arange(0, SIDE), tl.arange(0, sizes.BLOCK_D)
    at = sums + (tl.cast(part, tl.int64) * (M + N - 1) + first) * sizes.D
    at += tl.arange(0, SIDE)[:, None] * sizes.D + column[None, :]
    inside = (index >= 0) & (index < M + N - 1)
    tl.store(at, total * scores.scale, mask=inside[:, None] & (column < sizes.D)[None, :])


@triton.jit
def query_blocks(band, d, SIDE: tl.constexpr):
    """First and last + 1 of the query blocks with visible pairs d - SIDE < j - i <= d"""
    begin = tl.maximum(band.begin - d, 0) // SIDE
    end = tl.cdiv(tl.maximum(tl.minimum(band.M, band.end - d + SIDE - 1), 0), SIDE)
    if (d < band.low) | (d - SIDE + 1 > band.high):
        end = begin
    return begin, end


@triton.jit
def key_blocks(band, j, SIDE: tl.constexpr):
    """First and last + 1 of the key blocks with keys j - SIDE + 1 to j + SIDE - 1"""
    begin = tl.maximum(j - SIDE + 1, band.begin) // SIDE
    return begin, tl.cdiv(tl.maximum(tl.minimum(j + SIDE, band.end), 0), SIDE)


@triton.jit
def add_distances(total, tile, shift, scores, sizes):
    """Adds the pairs (r, u) of a tile at distances t = shift + r - u, 0 <= t < SIDE"""
    SIDE: tl.constexpr = sizes.BLOCK_M
    da = product_gradients(tile.ds, tile.products, scores)
    u = shift + tl.arange(0, SIDE)[:, None] - tl.arange(0, SIDE)[None, :]
    by_distance = tl.gather(da, u & (SIDE - 1), axis=1)  # SIDE is a power of 2
    by_distance = tl.where((u >= 0) & (u < SIDE), by_distance, 0.0).to(tile.q.dtype)
    return tl.dot(tl.trans(by_distance), tile.q, total, input_precision=sizes.PRECISION)
