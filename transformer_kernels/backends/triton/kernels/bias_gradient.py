"""Gradient of a dense bias: ds, summed over the broadcast dimensions of the bias.

- Bias with rows and columns: one program per tile sums over the batch entries and heads.
- Bias with columns only: one program per key block, batch entry and head.
- Bias without columns: no kernel, since each row of ds sums to dlse.

Scores are recomputed; sums run in a fixed order, without atomics. docs/attention.md, section 3.
"""

import triton
import triton.language as tl

from .arguments import UNSPECIALIZED
from .block_ranges import key_block_ranges, query_block_ranges
from .masks import band_of
from .primitives import head, program_head, tile_coords, vector_pointer
from .score_gradient import tile_gradients


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
