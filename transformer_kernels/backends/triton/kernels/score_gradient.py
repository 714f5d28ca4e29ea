"""Backward pass of one tile, from products to score gradients, in either orientation.

    p  = exp(s - lse), 0 where hidden
    dp = z (do v)
    ds = p (dp - delta),  delta = rowsum(do o) - dlse

docs/attention.md, section 3.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .dropout import dropout_factor
from .masks import is_live, visible
from .primitives import head, load_rows, program_head, sequence, vector_pointer
from .relative_keys import load_relative_rows, tile_products
from .scores import LOG2E, is_any_large, load_bias, natural_scores

SCANNED_ROWS = tl.constexpr(1024)
"""Rows that `has_large_rows` tests at a time."""


class Statistics(NamedTuple):
    """lse of rows (`base`: +inf for fully masked ones, so that their weights are 0), its rounding
    error in base 2 (`rest`), delta, and the sum of both parts of lse in base 2 (`fused`)."""

    base: Any
    rest: Any
    delta: Any
    fused: Any


class RowStatistics(NamedTuple):
    """Statistics for weights of one form: pointers to those of a head, or values. For fused
    exponents `base` is in base 2, and `rest` is part of it."""

    base: Any
    rest: Any
    delta: Any


class TileGradients(NamedTuple):
    """ds of a tile, 0 where hidden, with its products and its queries."""

    ds: Any
    products: Any
    q: Any


@triton.jit
def head_statistics(statistics, heads, rows, b, h, first, FUSED: tl.constexpr):
    """Pointers to the statistics of a head, from row `first` on"""
    base = statistics.base
    if FUSED:
        base = statistics.fused
    return RowStatistics(
        vector_pointer(base, heads, rows, b, h, first),
        vector_pointer(statistics.rest, heads, rows, b, h, first),
        vector_pointer(statistics.delta, heads, rows, b, h, first),
    )


@triton.jit
def load_statistics(of_head, i, M, CHECKED: tl.constexpr, FUSED: tl.constexpr):
    """Statistics of rows i; rows from M on as if fully masked"""
    if CHECKED:
        base = tl.load(of_head.base + i, mask=i < M, other=float("inf"))
        delta = tl.load(of_head.delta + i, mask=i < M, other=0.0)
    else:
        base, delta = tl.load(of_head.base + i), tl.load(of_head.delta + i)
    if FUSED:
        rest = tl.zeros_like(base)
    elif CHECKED:
        rest = tl.load(of_head.rest + i, mask=i < M, other=0.0)
    else:
        rest = tl.load(of_head.rest + i)
    return RowStatistics(base, rest, delta)


@triton.jit
def has_large_rows(of_head, begin, end):
    """True if some row begin..end is too large for fused exponents"""
    largest = tl.zeros([SCANNED_ROWS], tl.float32)
    for first in range(begin, end, SCANNED_ROWS):
        i = first + tl.arange(0, SCANNED_ROWS)
        x = tl.abs(tl.load(of_head.base + i, mask=i < end, other=0.0))
        largest = tl.maximum(largest, tl.where(x < float("inf"), x, 0.0))
    return is_any_large(largest)


@triton.jit
def weights(
    products, base, rest, bias, is_visible, mask, scores, coords, band, FUSED: tl.constexpr
):
    """p of a tile, 0 where not `is_visible` (None: everything is visible). Unless exponents are
    fused, the scaled score is rounded before lse (`base`) is subtracted, as in the forward pass:
    docs/attention.md, section 8.
    """
    if is_visible is not None:
        # Masks lse, not p: AMD's compiler cannot convert a bool tile to the layout of an operand.
        base = tl.where(is_visible, base, float("inf"))
    if FUSED:
        p = tl.exp2(tl.fma(products, scores.plain_scale, -base))
    else:
        s = natural_scores(products, bias, scores, coords, band)
        p = tl.exp2(tl.fma(s - base, LOG2E, -rest))
    if is_visible is not None and mask.has_elements:
        p = tl.where(base != float("inf"), p, 0.0)  # a key that no query sees may be NaN
    return p


@triton.jit
def score_gradients(p, dp, delta, is_visible, mask):
    """ds of a tile"""
    ds = p * (dp - delta)
    if is_visible is not None and mask.has_elements:
        ds = tl.where(p != 0.0, ds, 0.0)  # a value that no query sees may be NaN
    return ds


@triton.jit
def tile_gradients(
    q, k, v, do, statistics, rows, heads, memory_b, first_q, first_k,
    coords, band, mask, scores, dropout, sizes,
):  # fmt: skip
    """`TileGradients`; `sequence` returns memory_b, first_q and first_k"""
    PRECISION: tl.constexpr = sizes.PRECISION
    h, i0, j0 = coords.h, coords.i0, coords.j0
    h_kv = h // heads.group
    live = is_live(j0 + tl.arange(0, sizes.BLOCK_N), band)
    q_head, do_head = head(q, memory_b, h, first_q), head(do, memory_b, h, first_q)
    k_head, v_head = head(k, memory_b, h_kv, first_k), head(v, memory_b, h_kv, first_k)
    of_head = head_statistics(statistics, heads, rows, memory_b, h, first_q, False)
    of_rows = load_statistics(of_head, i0 + tl.arange(0, sizes.BLOCK_M), band.M, True, False)
    rows_live = of_rows.base < float("inf")
    q_tile = load_rows(q_head, i0, rows_live, sizes.D, sizes.BLOCK_D, True)
    k_tile = load_rows(k_head, j0, live, sizes.D, sizes.BLOCK_D, True)
    bias, is_visible = load_bias(scores, coords, band), visible(mask, band, coords)
    relative = load_relative_rows(scores, coords, band, sizes)
    products = tile_products(q_tile, k_tile, relative, scores, sizes, TRANSPOSED=False)
    base, rest = of_rows.base[:, None], of_rows.rest[:, None]
    p = weights(products, base, rest, bias, is_visible, mask, scores, coords, band, False)
    do_tile = load_rows(do_head, i0, rows_live, sizes.D_V, sizes.BLOCK_DV, True)
    v_tile = load_rows(v_head, j0, live, sizes.D_V, sizes.BLOCK_DV, True)
    z = dropout_factor(dropout, coords, sizes, TRANSPOSED=False)
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION) * z
    ds = score_gradients(p, dp, of_rows.delta[:, None], is_visible, mask)
    return TileGradients(ds, products, q_tile)


@triton.jit(do_not_specialize=["rows", "M", "N", "lse_rest"])
def bwd_preprocess_kernel(
    o, do, lse, lse_rest, dlse, statistics, rows, M, N, heads, sequences,
    D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Backward preprocess: the statistics of a row, with delta = rowsum(do o) - dlse"""
    blocks = tl.cdiv(M, BLOCK_M)
    h, b = program_head(blocks, heads.H_q)
    memory_b, first_q, _, M, _ = sequence(sequences, b, M, N, rows, rows)
    i0 = tl.program_id(0) % blocks * BLOCK_M
    i = i0 + tl.arange(0, BLOCK_M)
    o_head, do_head = head(o, memory_b, h, first_q), head(do, memory_b, h, first_q)
    o_tile = load_rows(o_head, i0, i < M, D_V, BLOCK_DV, True)
    do_tile = load_rows(do_head, i0, i < M, D_V, BLOCK_DV, True)
    total = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if dlse is not None:
        dlse_rows = vector_pointer(dlse, heads, rows, memory_b, h, first_q)
        total -= tl.load(dlse_rows + i, mask=i < M, other=0.0)
    delta_rows = vector_pointer(statistics.delta, heads, rows, memory_b, h, first_q)
    tl.store(delta_rows + i, total, mask=i < M)
    lse_rows = vector_pointer(lse, heads, rows, memory_b, h, first_q)
    lse_i = tl.load(lse_rows + i, mask=i < M, other=0.0)
    lse_i = tl.where(lse_i == float("-inf"), float("inf"), lse_i)
    base_rows = vector_pointer(statistics.base, heads, rows, memory_b, h, first_q)
    tl.store(base_rows + i, lse_i, mask=i < M)
    given_rest = vector_pointer(lse_rest, heads, rows, memory_b, h, first_q)
    rest = tl.load(given_rest + i, mask=i < M, other=0.0) * LOG2E
    rest_rows = vector_pointer(statistics.rest, heads, rows, memory_b, h, first_q)
    tl.store(rest_rows + i, rest, mask=i < M)
    fused_rows = vector_pointer(statistics.fused, heads, rows, memory_b, h, first_q)
    tl.store(fused_rows + i, tl.fma(lse_i, LOG2E, rest), mask=i < M)
