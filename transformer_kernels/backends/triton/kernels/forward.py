"""Forward kernel: one program per query block, online softmax over its visible key blocks.

    s   = q k^T; with score options: scale q k^T, capped, biased; -inf where hidden
    m'  = max(m, max_j s),  p = 2^(unit (s - m'))
    l   = l 2^(unit (m - m')) + sum_j p,  o = o 2^(unit (m - m')) + z p v
    output = o / l,  lse = unit ln(2) m + log l

unit is log2(e), or log2(e) scale. Exponents of plain scores in half precision are fused, unit s -
round(unit m): the rounding error of unit m cancels in o, and is subtracted from log l. Otherwise m
is subtracted before the multiplication: exponents are never positive, and those of large scores are
exact near 0. docs/attention.md, sections 2, 5 and 8.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arguments import UNSPECIALIZED
from .block_ranges import block_schedule, block_start, key_block_ranges, visits
from .cache import add_values, key_places, load_keys, scaled_products
from .dropout import dropped
from .masks import is_live, sequence_band, visible, zero_hidden_keys
from .primitives import (
    head,
    load_rows,
    program_head,
    sequence,
    store_rows,
    tile_coords,
    vector_pointer,
)
from .relative_keys import load_relative_rows, tile_products
from .scores import (
    LN2,
    finite_maximum,
    fused_maximum,
    fused_unit,
    load_bias,
    log2_unit,
    natural_unit,
    unscaled_scores,
)


class Softmax(NamedTuple):
    """State of the online softmax: maximum and sum of a row, and the unscaled output."""

    m_i: Any
    l_i: Any
    acc: Any


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "lse_rest"])  # any alignment
def forward_kernel(
    q, k, v, o, lse, lse_rest,
    rows, M, N, low, high, offset, rows_k,
    heads, sequences, mask, lists, scores, dropout, cache, sizes,
):  # fmt: skip
    # Last query blocks first: under a causal mask they have the most work.
    blocks = tl.cdiv(M, sizes.BLOCK_M)
    block = blocks - 1 - tl.program_id(0) % blocks
    h, b = program_head(blocks, heads.H_q)
    memory_b, first_q, first_k, own_M, own_N = sequence(sequences, b, M, N, rows, rows_k)
    if cache.table is not None:
        first_k, own_N = 0, tl.minimum(own_N, cache.table_b * cache.page_size)
    band = sequence_band(mask, sequences, b, M, N, own_M, own_N, low, high, offset)
    i0 = block * sizes.BLOCK_M
    if i0 >= band.M:
        return

    i = i0 + tl.arange(0, sizes.BLOCK_M)
    q_head = head(q, memory_b, h, first_q)
    q_tile = load_rows(q_head, i0, i < band.M, sizes.D, sizes.BLOCK_D, True)
    kv = h // heads.group
    k_head, v_head = head(k, memory_b, kv, first_k), head(v, memory_b, kv, first_k)
    state = empty_softmax(sizes)

    FUSED: tl.constexpr = scores.plain_scale is not None and q.data.dtype.element_ty != tl.float32
    GRAIN: tl.constexpr = sizes.KEY_GRAIN
    BLOCK: tl.constexpr = sizes.BLOCK_N
    ranges = key_block_ranges(band, i0, sizes.BLOCK_M, BLOCK)
    schedule = block_schedule(ranges, lists, b, h, i0 // sizes.ROW_GRAIN, GRAIN, BLOCK)
    for MASKED in tl.static_range(2):
        begin, end = visits(schedule, MASKED)
        for n in range(begin, end):
            j0 = block_start(schedule, lists, n, MASKED, GRAIN, BLOCK)
            coords = tile_coords(b, h, i0, j0, sizes, TRANSPOSED=False)
            state = add_keys(
                state, q_tile, k_head, v_head, kv, coords, band, mask, scores, dropout, cache,
                sizes, MASKED, FUSED,
            )  # fmt: skip

    total, lse_i, rest = normalizer(state.m_i, state.l_i, scores, FUSED)
    acc = state.acc * (dropout.factor / total)[:, None]
    store_rows(head(o, memory_b, h, first_q), i0, i < band.M, acc, sizes.D_V)
    tl.store(vector_pointer(lse, heads, rows, memory_b, h, first_q) + i, lse_i, mask=i < band.M)
    rest_rows = vector_pointer(lse_rest, heads, rows, memory_b, h, first_q)
    tl.store(rest_rows + i, rest, mask=i < band.M)


@triton.jit
def empty_softmax(sizes):
    return Softmax(
        tl.full([sizes.BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([sizes.BLOCK_M], tl.float32),
        tl.zeros([sizes.BLOCK_M, sizes.BLOCK_DV], tl.float32),
    )


@triton.jit
def normalizer(m_i, l_i, scores, FUSED: tl.constexpr):
    """(divisor of the output, lse, its rounding error) of rows without further keys"""
    empty = l_i == 0.0
    total = tl.where(empty, 1.0, l_i)
    log2_l = tl.log2(total)
    if FUSED:  # the sum of 2^(unit s - round(unit m))
        unit = fused_unit(m_i, scores)
        log2_l -= tl.fma(m_i, unit, -fused_maximum(m_i, unit))
    m_i, log_l = m_i * natural_unit(scores), log2_l * LN2
    lse_i = m_i + log_l
    added = lse_i - m_i
    rest = (m_i - (lse_i - added)) + (log_l - added)  # Knuth's TwoSum: the rounding error of lse
    return total, tl.where(empty, float("-inf"), lse_i), tl.where(empty, 0.0, rest)


@triton.jit
def add_keys(
    state, q_tile, k, v, kv, coords, band, mask, scores, dropout, cache, sizes,
    MASKED: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Updates the softmax state with one key block of key head kv"""
    PRECISION: tl.constexpr = sizes.PRECISION
    j = coords.j0 + tl.arange(0, sizes.BLOCK_N)
    places = key_places(cache, coords.b, j, is_live(j, band))
    k_tile = load_keys(k, coords.j0, places, cache, sizes.D, sizes.BLOCK_D, MASKED)
    # Per-score loads must precede the product: docs/triton.md, section 4.
    bias = load_bias(scores, coords, band)
    relative = load_relative_rows(scores, coords, band, sizes)
    is_visible = None
    if MASKED:
        is_visible = visible(mask, band, coords)
    k_tile = k_tile.to(q_tile.dtype)
    products = tile_products(q_tile, k_tile, relative, scores, sizes, TRANSPOSED=False)
    products = scaled_products(products, cache, places, kv)
    s = unscaled_scores(products, bias, scores, coords, band)
    v_tile = load_keys(v, coords.j0, places, cache, sizes.D_V, sizes.BLOCK_DV, MASKED)
    if MASKED:
        s = tl.where(is_visible, s, float("-inf"))
    v_tile = zero_hidden_keys(v_tile, is_visible, mask)

    m_i = tl.maximum(state.m_i, tl.max(s, 1))
    if FUSED:
        unit = fused_unit(m_i, scores)
        base = fused_maximum(m_i, unit)
        decay = tl.exp2(fused_maximum(state.m_i, unit) - base)
        p = tl.exp2(tl.fma(s, unit[:, None], -base[:, None]))
    else:
        base = finite_maximum(m_i, scores, MASKED)
        p = tl.exp2((s - base[:, None]) * log2_unit(scores))
        decay = tl.exp2((state.m_i - base) * log2_unit(scores))
    l_i = state.l_i * decay + tl.sum(p, 1)
    p = dropped(p, dropout, coords, sizes)
    acc = state.acc * decay[:, None]
    acc = add_values(acc, p, v_tile, cache, places, kv, q_tile.dtype, PRECISION)
    return Softmax(m_i, l_i, acc)
