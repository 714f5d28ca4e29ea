"""Decoding: a few queries of each sequence to its cache, split over keys.

Row r of a tile is query r // pack of head r % pack among the `pack` query heads that share keys: a
block of keys is loaded once for all of them. A program adds one of `splits` equal runs of the key
blocks that its tile sees to an online softmax (forward.py), whose state (m, l, acc) it stores. The
combine kernel merges the states of a row:

    m' = max_s m_s,  w_s = 2^(unit (m_s - m')),  output = sum_s w_s acc_s / sum_s w_s l_s

A single split stores the output itself. docs/attention.md, sections 5 and 6.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .arguments import UNSPECIALIZED
from .block_ranges import BlockRanges, block_ranges, block_schedule, block_start, visits
from .forward import add_keys, empty_softmax, normalizer
from .masks import sequence_band
from .primitives import TileCoords, head, load_tile, program_head
from .scores import finite_maximum, log2_unit


class Partial(NamedTuple):
    """Softmax states of the splits of each row, float32; None if there is one split."""

    m: Tensor | None
    """(B, H_q, M, splits), also l"""
    l: Tensor | None  # noqa: E741  (the symbol of the sum)
    acc: Tensor | None
    """(B, H_q, M, splits, D_v)"""


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "pack", "splits"])
def decode_kernel(
    q, k, v, o, lse, partial, lengths, pack, splits,
    rows, M, N, low, high, offset, rows_k,
    heads, sequences, mask, lists, scores, dropout, cache, sizes,
):  # fmt: skip
    tiles = tl.cdiv(M * pack, sizes.BLOCK_M)
    tile, split = tl.program_id(0) // splits % tiles, tl.program_id(0) % splits
    first_head, b = program_head(tiles * splits, heads.H_q // pack)
    first_head *= pack
    kv = first_head // heads.group
    length = tl.minimum(tl.maximum(tl.load(lengths + b), 0), N)  # not validated
    band = sequence_band(mask, sequences, b, M, N, M, length, low, high, offset)

    row = tile * sizes.BLOCK_M + tl.arange(0, sizes.BLOCK_M)
    i, h = row // pack, first_head + row % pack
    i0 = tile * sizes.BLOCK_M // pack
    last = tl.minimum((tile * sizes.BLOCK_M + sizes.BLOCK_M - 1) // pack, M - 1)
    at = row_addresses(q, b, h, i)[:, None] + tl.arange(0, sizes.BLOCK_D)[None, :]
    q_tile = load_tile(at, i < M, sizes.D, True)
    entry = b
    if cache.table is not None:
        entry = 0
    k_head, v_head = head(k, entry, kv, 0), head(v, entry, kv, 0)

    GRAIN: tl.constexpr = sizes.KEY_GRAIN
    BLOCK: tl.constexpr = sizes.BLOCK_N
    ranges = block_ranges(i0, last, band.low, band.high, band.begin, band.end, BLOCK)
    schedule = block_schedule(split_of(ranges, split, splits), lists, b, kv, 0, GRAIN, BLOCK)
    state = empty_softmax(sizes)
    for MASKED in tl.static_range(2):
        begin, end = visits(schedule, MASKED)
        for n in range(begin, end):
            j0 = block_start(schedule, lists, n, MASKED, GRAIN, BLOCK)
            j = j0 + tl.arange(0, BLOCK)[None, :]
            if scores.relative_keys is None:
                coords = TileCoords(b, h[:, None], i0, j0, i[:, None], j)
            else:  # pack is 1
                coords = TileCoords(b, first_head, i0, j0, i[:, None], j)
            state = add_keys(
                state, q_tile, k_head, v_head, kv, coords, band, mask, scores, dropout, cache,
                sizes, MASKED, False,
            )  # fmt: skip

    index = (tl.cast(b, tl.int64) * heads.H_q + h) * M + i
    if partial.m is not None:
        index = index * splits + split
    store_state(state, row_addresses(o, b, h, i), lse, partial, index, i < M, scores, sizes.D_V)


@triton.jit
def store_state(state, o, lse, partial, index, in_bounds, scores, D_V: tl.constexpr):
    """Stores o and lse, or a part of them; o are addresses of rows, and the others have `index`"""
    columns = tl.arange(0, state.acc.shape[1])[None, :]
    inside = in_bounds[:, None] & (columns < D_V)
    if partial.m is None:
        total, lse_i, _ = normalizer(state.m_i, state.l_i, scores, False)
        acc = (state.acc / total[:, None]).to(o.dtype.element_ty)
        tl.store(o[:, None] + columns, acc, mask=inside)
        tl.store(lse + index, lse_i, mask=in_bounds)
    else:
        tl.store(partial.m + index, state.m_i, mask=in_bounds)
        tl.store(partial.l + index, state.l_i, mask=in_bounds)
        tl.store(partial.acc + index[:, None] * D_V + columns, state.acc, mask=inside)


@triton.jit
def split_of(ranges, split, splits):
    """Part of the `BlockRanges` that one of `splits` programs visits"""
    size = tl.cdiv(ranges.any_end - ranges.any_begin, splits)
    begin = tl.minimum(ranges.any_begin + split * size, ranges.any_end)
    end = tl.minimum(begin + size, ranges.any_end)
    all_begin = tl.minimum(tl.maximum(ranges.all_begin, begin), end)
    all_end = tl.minimum(tl.maximum(ranges.all_end, begin), end)
    return BlockRanges(begin, all_begin, all_end, end)


@triton.jit
def row_addresses(rows, b, h, i):
    """Pointers to queries i of heads h"""
    at = tl.cast(b, tl.int64) * rows.stride_b + h.to(tl.int64) * rows.stride_h
    return rows.data + at + i.to(tl.int64) * rows.stride_l


@triton.jit(do_not_specialize=["M", "splits"])
def combine_kernel(
    o, lse, partial, M, splits, heads, scores,
    D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Output and lse of one row, from BLOCK_M splits at a time"""
    index = tl.cast(tl.program_id(0), tl.int64)
    h, b = program_head(M, heads.H_q)
    columns = tl.arange(0, BLOCK_DV)
    m_i, l_i = float("-inf"), 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for first in range(0, splits, BLOCK_M):
        split = first + tl.arange(0, BLOCK_M)
        at, inside = index * splits + split, split < splits
        m_s = tl.load(partial.m + at, mask=inside, other=float("-inf"))
        l_s = tl.load(partial.l + at, mask=inside, other=0.0)
        at = partial.acc + at[:, None] * D_V + columns[None, :]
        acc_s = tl.load(at, mask=inside[:, None] & (columns < D_V)[None, :], other=0.0)
        before, m_i = m_i, tl.maximum(m_i, tl.max(m_s, 0))
        base = finite_maximum(m_i, scores, True)
        w = tl.exp2((m_s - base) * log2_unit(scores))
        decay = tl.exp2((before - base) * log2_unit(scores))
        l_i = l_i * decay + tl.sum(w * l_s, 0)
        acc = acc * decay + tl.sum(w[:, None] * acc_s, 0)
    total, lse_i, _ = normalizer(m_i, l_i, scores, False)
    at = o.data + tl.cast(b, tl.int64) * o.stride_b + tl.cast(h, tl.int64) * o.stride_h
    at += tl.cast(tl.program_id(0) % M, tl.int64) * o.stride_l + columns
    tl.store(at, (acc / total).to(o.data.dtype.element_ty), mask=columns < D_V)
    tl.store(lse + index, lse_i)
