"""Dense masks, layouts and segments, summed up by blocks; and which blocks each block visits.

The block_mask has a byte for each 64 x 64 block: 0 hidden, 1 in part, 2 wholly visible. It is made
once, in the forward pass. Lists are made from it for each kernel, whose tiles may be larger, and
take diagonals and key ranges in as well.
"""

import triton
import triton.language as tl

from transformer_kernels.backends.triton.kernels.masks import (
    flagged,
    key_range,
    key_spans,
    query_spans,
)

BLOCK_MASK_SIZE = tl.constexpr(64)
CHUNK = tl.constexpr(128)
"""blocks that a program of a list looks at together"""


@triton.jit(do_not_specialize=["M", "N"])
def block_mask_kernel(block_mask, M, N, mask, heads, BLOCK: tl.constexpr):
    """A program a block; block_mask is (B or 1, heads, row blocks, column blocks) bytes"""
    row_blocks, column_blocks = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
    program = tl.program_id(0)
    column = program % column_blocks
    row = program // column_blocks % row_blocks
    h = program // column_blocks // row_blocks % heads
    b = program // column_blocks // row_blocks // heads
    i = row * BLOCK + tl.arange(0, BLOCK)[:, None]
    j = column * BLOCK + tl.arange(0, BLOCK)[None, :]
    shown = flagged(mask, b, h, i, j, M, N)
    as_all = shown == ((i < M) & (j < N))
    some = tl.max(tl.max(shown.to(tl.int32), 1), 0)
    every = tl.min(tl.min(as_all.to(tl.int32), 1), 0)
    tl.store(block_mask + program, (some + every * some).to(tl.uint8))


@triton.jit(do_not_specialize=["M", "N", "low", "high"])
def list_kernel(
    block_mask,
    strides,
    lists,
    M,
    N,
    low,
    high,
    mask,
    heads,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BY_KEYS: tl.constexpr,
):
    """The list of one block: of queries, or of keys if BY_KEYS. Blocks are multiples of 64."""
    if BY_KEYS:
        blocks = tl.cdiv(N, BLOCK_N)
    else:
        blocks = tl.cdiv(M, BLOCK_M)
    program = tl.program_id(0)
    block = program % blocks
    h = program // blocks % heads
    b = program // blocks // heads
    begin, end = key_range(mask, b, N)
    if BY_KEYS:
        any_begin, all_begin, all_end, any_end = query_spans(
            low, high, begin, end, block * BLOCK_N, M, BLOCK_M, BLOCK_N
        )
    else:
        any_begin, all_begin, all_end, any_end = key_spans(
            low, high, begin, end, block * BLOCK_M, M, BLOCK_M, BLOCK_N
        )

    indices = lists.indices + tl.cast(program, tl.int64) * lists.columns
    entries = block_mask + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    in_part, in_full = 0, 0
    for chunk in range(any_begin, any_end, CHUNK):
        other = chunk + tl.arange(0, CHUNK)
        this = block + 0 * other
        if BY_KEYS:
            some, every = tile_entry(entries, strides[2], other, this, M, N, BLOCK_M, BLOCK_N)
        else:
            some, every = tile_entry(entries, strides[2], this, other, M, N, BLOCK_M, BLOCK_N)
        some = some & (other < any_end)
        full = some & every & (other >= all_begin) & (other < all_end)
        part = some != full
        part_rank = in_part + tl.cumsum(part.to(tl.int32), 0) - 1
        full_rank = in_full + tl.cumsum(full.to(tl.int32), 0) - 1
        tl.store(indices + part_rank, other, mask=part)
        tl.store(indices + lists.columns - 1 - full_rank, other, mask=full)
        in_part += tl.sum(part.to(tl.int32), 0)
        in_full += tl.sum(full.to(tl.int32), 0)
    tl.store(lists.counts + 2 * program, in_part)
    tl.store(lists.counts + 2 * program + 1, in_full)


@triton.jit
def tile_entry(
    entries, row_stride, row, column, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Whether something, and whether everything, is visible in these tiles"""
    ROWS: tl.constexpr = BLOCK_M // BLOCK_MASK_SIZE
    COLUMNS: tl.constexpr = BLOCK_N // BLOCK_MASK_SIZE
    some = row < 0
    every = row >= 0
    for r in tl.static_range(ROWS):
        for c in tl.static_range(COLUMNS):
            at_row, at_column = row * ROWS + r, column * COLUMNS + c
            there = (at_row * BLOCK_MASK_SIZE < M) & (at_column * BLOCK_MASK_SIZE < N)
            entry = tl.load(entries + at_row * row_stride + at_column, mask=there, other=2)
            some = some | (there & (entry > 0))
            every = every & (entry == 2)
    return some, every
