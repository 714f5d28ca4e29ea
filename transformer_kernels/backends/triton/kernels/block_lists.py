"""Block mask of position tests, dense masks and layouts, and the lists of blocks to visit.

The block mask has one byte for each 64 x 64 block: 0 empty, 1 partial, 2 full. It is computed once,
in the forward pass. Each kernel gets its own lists, built from the block mask for the kernel's tile
size. The lists also account for the band and the key range.
"""

import triton
import triton.language as tl

from .block_ranges import key_block_ranges, query_block_ranges
from .masks import band_of, element_mask
from .primitives import TileCoords, program_head

BLOCK_MASK_SIZE = tl.constexpr(64)
CHUNK = tl.constexpr(128)
"""Blocks that one list program tests at a time."""


@triton.jit(do_not_specialize=["M", "N"])
def block_mask_kernel(block_mask, M, N, mask, heads, BLOCK: tl.constexpr):
    """Block mask, (B or 1, heads, row blocks, column blocks) uint8: one program per block"""
    row_blocks, column_blocks = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
    program = tl.program_id(0)
    column = program % column_blocks
    row = program // column_blocks % row_blocks
    h = program // column_blocks // row_blocks % heads
    b = program // column_blocks // row_blocks // heads
    i = row * BLOCK + tl.arange(0, BLOCK)[:, None]
    j = column * BLOCK + tl.arange(0, BLOCK)[None, :]
    coords = TileCoords(b, h, row * BLOCK, column * BLOCK, i, j)
    is_visible = element_mask(mask, coords, M, N)
    matches_bounds = is_visible == ((i < M) & (j < N))
    any_visible = tl.max(tl.max(is_visible.to(tl.int32), 1), 0)
    all_visible = tl.min(tl.min(matches_bounds.to(tl.int32), 1), 0)
    tl.store(block_mask + program, (any_visible + all_visible * any_visible).to(tl.uint8))


@triton.jit(do_not_specialize=["M", "N", "low", "high"])
def list_kernel(
    block_mask, strides, lists, M, N, low, high, mask, heads,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BY_KEYS: tl.constexpr,
):  # fmt: skip
    """Block list of one query block, or of one key block if BY_KEYS. Block sizes are multiples of
    64."""
    if BY_KEYS:
        blocks = tl.cdiv(N, BLOCK_N)
    else:
        blocks = tl.cdiv(M, BLOCK_M)
    program = tl.program_id(0)
    block = program % blocks
    h, b = program_head(blocks, heads)
    band = band_of(mask, b, M, N, low, high, 0, 0, 0)
    if BY_KEYS:
        ranges = query_block_ranges(band, block * BLOCK_N, BLOCK_M, BLOCK_N)
    else:
        ranges = key_block_ranges(band, block * BLOCK_M, BLOCK_M, BLOCK_N)

    indices = lists.indices + tl.cast(program, tl.int64) * lists.columns
    entries = block_mask + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    num_partial, num_full = 0, 0
    for chunk in range(ranges.any_begin, ranges.any_end, CHUNK):
        other = chunk + tl.arange(0, CHUNK)
        this = block + 0 * other
        if BY_KEYS:
            any_visible, all_visible = tile_entry(
                entries, strides[2], other, this, M, N, BLOCK_M, BLOCK_N
            )
        else:
            any_visible, all_visible = tile_entry(
                entries, strides[2], this, other, M, N, BLOCK_M, BLOCK_N
            )
        any_visible = any_visible & (other < ranges.any_end)
        full = any_visible & all_visible
        full = full & (other >= ranges.all_begin) & (other < ranges.all_end)
        partial = any_visible != full
        partial_rank = num_partial + tl.cumsum(partial.to(tl.int32), 0) - 1
        full_rank = num_full + tl.cumsum(full.to(tl.int32), 0) - 1
        tl.store(indices + partial_rank, other, mask=partial)
        tl.store(indices + lists.columns - 1 - full_rank, other, mask=full)
        num_partial += tl.sum(partial.to(tl.int32), 0)
        num_full += tl.sum(full.to(tl.int32), 0)
    tl.store(lists.counts + 2 * program, num_partial)
    tl.store(lists.counts + 2 * program + 1, num_full)


@triton.jit
def is_empty(block_mask, strides, b, h, i0, j0):
    """True if the block mask hides the tile at (i0, j0), whose sides divide 64; block_mask may be
    None"""
    if block_mask is None:
        return False
    else:
        entries = block_mask + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
        row, column = i0 // BLOCK_MASK_SIZE, j0 // BLOCK_MASK_SIZE
        return tl.load(entries + row * strides[2] + column) == 0


@triton.jit
def tile_entry(
    entries, row_stride, row, column, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """(any_visible, all_visible) of the tiles (row, column), from their 64 x 64 blocks"""
    ROWS: tl.constexpr = BLOCK_M // BLOCK_MASK_SIZE
    COLUMNS: tl.constexpr = BLOCK_N // BLOCK_MASK_SIZE
    any_visible = row < 0
    all_visible = row >= 0
    for r in tl.static_range(ROWS):
        for c in tl.static_range(COLUMNS):
            at_row, at_column = row * ROWS + r, column * COLUMNS + c
            in_bounds = (at_row * BLOCK_MASK_SIZE < M) & (at_column * BLOCK_MASK_SIZE < N)
            entry = tl.load(entries + at_row * row_stride + at_column, mask=in_bounds, other=2)
            any_visible = any_visible | (in_bounds & (entry > 0))
            all_visible = all_visible & (entry == 2)
    return any_visible, all_visible
