"""Gradients of a dense bias, of a relative bias and of relative keys: sums of ds over tiles.

Scores are recomputed. Sums run in a fixed order, without atomics. docs/attention.md, section 3.

**Dense bias**: ds, summed over the broadcast dimensions of the bias.

- With rows and columns: one program per tile sums over the batch entries and heads.
- With columns only: one program per key block, batch entry and head.
- Without columns: no kernel, since each row of ds sums to dlse.

**Relative bias**: ds, summed over the elements of each distance i - j. A program sums the tiles of
one strip: those with the same i0 - j0 = strip T, where T is the side of a tile. Elements at the
same place in such tiles have the same distance, strip T + r - u in row r and column u. The tiles
are added element by element, and their sum is added up along its diagonals once. Distances that are
not a multiple of T lie in two strips: `sums` has a row for either.

**Relative keys**: da q, summed over the pairs of each distance. A program sums one block of
distances. The pairs of a query block that have these distances lie in two neighbouring tiles, or
three if a packed sequence begins at another distance.
"""

import triton
import triton.language as tl

from .arguments import UNSPECIALIZED
from .block_lists import is_empty
from .block_ranges import key_block_ranges, query_block_ranges
from .masks import band_of, sequence_band
from .primitives import head, program_head, sequence, tile_coords, vector_pointer
from .score_gradient import tile_gradients
from .scores import is_distance, product_gradients


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "B", "own_b", "own_h"])
def tile_sums_kernel(
    q, k, v, do, statistics, dbias,
    rows, M, N, low, high, offset,
    heads, mask, scores, dropout, B, own_b, own_h, sizes,
):  # fmt: skip
    """dbias (own_b, own_h, M, N), with own_b = B or 1 and own_h = H_q or 1"""
    row_blocks, column_blocks = tl.cdiv(M, sizes.BLOCK_M), tl.cdiv(N, sizes.BLOCK_N)
    program = tl.program_id(0)
    j0 = program % column_blocks * sizes.BLOCK_N
    i0 = program // column_blocks % row_blocks * sizes.BLOCK_M
    first_h = program // column_blocks // row_blocks % own_h
    first_b = program // column_blocks // row_blocks // own_h
    total = tl.zeros([sizes.BLOCK_M, sizes.BLOCK_N], tl.float32)
    for b in range(first_b, B, own_b):
        band = band_of(mask, b, M, N, low, high, offset, N - 1, M + N - 1)
        ranges = key_block_ranges(band, i0, sizes.BLOCK_M, sizes.BLOCK_N)
        begin, end = ranges.any_begin * sizes.BLOCK_N, ranges.any_end * sizes.BLOCK_N
        if (j0 >= begin) & (j0 < end):
            for h in range(first_h, heads.H_q, own_h):
                coords = tile_coords(b, h, i0, j0, sizes, TRANSPOSED=False)
                tile = tile_gradients(
                    q, k, v, do, statistics, rows, heads, b, 0, 0,
                    coords, band, mask, scores, dropout, sizes,
                )  # fmt: skip
                total += tile.ds
    i, j = i0 + tl.arange(0, sizes.BLOCK_M)[:, None], j0 + tl.arange(0, sizes.BLOCK_N)[None, :]
    to = head(dbias, first_b, first_h, 0)
    at = to.data + i.to(tl.int64) * to.stride + j
    tl.store(at, total.to(dbias.data.dtype.element_ty), mask=(i < M) & (j < N))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def column_sums_kernel(
    q, k, v, do, statistics, sums,
    rows, M, N, low, high, offset,
    heads, mask, scores, dropout, sizes,
):  # fmt: skip
    """sums (B, H_q, N) float32: ds summed over the queries"""
    blocks = tl.cdiv(N, sizes.BLOCK_N)
    h, b = program_head(blocks, heads.H_q)
    j0 = tl.program_id(0) % blocks * sizes.BLOCK_N
    total = tl.zeros([sizes.BLOCK_N], tl.float32)
    band = band_of(mask, b, M, N, low, high, offset, N - 1, M + N - 1)
    ranges = query_block_ranges(band, j0, sizes.BLOCK_M, sizes.BLOCK_N)
    for n in range(ranges.any_begin, ranges.any_end):
        coords = tile_coords(b, h, n * sizes.BLOCK_M, j0, sizes, TRANSPOSED=False)
        tile = tile_gradients(
            q, k, v, do, statistics, rows, heads, b, 0, 0,
            coords, band, mask, scores, dropout, sizes,
        )  # fmt: skip
        total += tl.sum(tile.ds, 0)
    j = j0 + tl.arange(0, sizes.BLOCK_N)
    tl.store(vector_pointer(sums, heads, N, b, h, 0) + j, total, mask=j < N)


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
