"""Backward kernels: bwd_dkdv runs one program per key block, bwd_dq one per query block.

    dv = (z p)^T do,  dk = scale da^T q,  dq = scale da (k + r)

r are the relative keys. Both kernels recompute the weights from q, k, r and lse (`base`). One
program sums each gradient in a fixed order, dk and dv also over the query heads of their group.
There are no atomics, so gradients are bit-identical from run to run.
docs/attention.md, section 3.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arguments import UNSPECIALIZED
from .block_ranges import (
    block_schedule,
    block_start,
    key_block_ranges,
    query_block_ranges,
    visits,
)
from .dropout import dropout_factor
from .masks import is_live, sequence_band, visible, zero_hidden_keys
from .primitives import head, load_rows, program_head, sequence, store_rows, tile_coords
from .relative_keys import add_relative_rows, load_relative_rows, tile_products
from .score_gradient import (
    has_large_rows,
    head_statistics,
    load_statistics,
    score_gradients,
    weights,
)
from .scores import is_any_large, load_bias, product_gradients


class KeyGradients(NamedTuple):
    """Sums of dk / scale and dv, float32."""

    dk: Any
    dv: Any


@triton.jit(do_not_specialize=UNSPECIALIZED)
def bwd_dkdv_kernel(
    q, k, v, do, statistics, dk, dv,
    rows, M, N, low, high, offset, rows_k,
    heads, sequences, mask, lists, scores, dropout, sizes,
):  # fmt: skip
    """dk and dv of a key block; tiles are (keys, queries)"""
    blocks = tl.cdiv(N, sizes.BLOCK_N)
    h_kv, b = program_head(blocks, heads.H_q // heads.group)
    memory_b, first_q, first_k, own_M, own_N = sequence(sequences, b, M, N, rows, rows_k)
    band = sequence_band(mask, sequences, b, M, N, own_M, own_N, low, high, offset)
    j0 = tl.program_id(0) % blocks * sizes.BLOCK_N
    if j0 >= band.N:
        return

    j = j0 + tl.arange(0, sizes.BLOCK_N)
    live = is_live(j, band)
    k_head, v_head = head(k, memory_b, h_kv, first_k), head(v, memory_b, h_kv, first_k)
    k_tile = load_rows(k_head, j0, live, sizes.D, sizes.BLOCK_D, True)
    v_tile = load_rows(v_head, j0, live, sizes.D_V, sizes.BLOCK_DV, True)
    sums = KeyGradients(
        tl.zeros([sizes.BLOCK_N, sizes.BLOCK_D], tl.float32),
        tl.zeros([sizes.BLOCK_N, sizes.BLOCK_DV], tl.float32),
    )
    FUSED: tl.constexpr = scores.plain_scale is not None and q.data.dtype.element_ty != tl.float32
    ranges = query_block_ranges(band, j0, sizes.BLOCK_M, sizes.BLOCK_N)
    for h in range(h_kv * heads.group, (h_kv + 1) * heads.group):
        q_head, do_head = head(q, memory_b, h, first_q), head(do, memory_b, h, first_q)
        of_head = head_statistics(statistics, heads, rows, memory_b, h, first_q, FUSED)
        block = j0 // sizes.KEY_GRAIN
        schedule = block_schedule(ranges, lists, b, h, block, sizes.ROW_GRAIN, sizes.BLOCK_M)
        is_large = False
        if FUSED:
            end = tl.minimum(ranges.any_end * sizes.BLOCK_M, band.M)
            is_large = has_large_rows(of_head, ranges.any_begin * sizes.BLOCK_M, end)
        if is_large:
            of_head = head_statistics(statistics, heads, rows, memory_b, h, first_q, False)
            sums = add_head(
                sums, k_tile, v_tile, q_head, do_head, of_head, b, h, j0,
                schedule, lists, band, mask, scores, dropout, sizes, False,
            )  # fmt: skip
        else:
            sums = add_head(
                sums, k_tile, v_tile, q_head, do_head, of_head, b, h, j0,
                schedule, lists, band, mask, scores, dropout, sizes, FUSED,
            )  # fmt: skip
    dk_sum = sums.dk * scores.scale
    store_rows(head(dk, memory_b, h_kv, first_k), j0, j < band.N, dk_sum, sizes.D)
    store_rows(head(dv, memory_b, h_kv, first_k), j0, j < band.N, sums.dv, sizes.D_V)


@triton.jit
def add_head(
    sums, k_tile, v_tile, q, do, of_head, b, h, j0,
    schedule, lists, band, mask, scores, dropout, sizes, FUSED: tl.constexpr,
):  # fmt: skip
    """Adds the query blocks of one head to dk / scale and dv"""
    GRAIN: tl.constexpr = sizes.ROW_GRAIN
    BLOCK: tl.constexpr = sizes.BLOCK_M
    for MASKED in tl.static_range(2):
        begin, end = visits(schedule, MASKED)
        for n in range(begin, end):
            i0 = block_start(schedule, lists, n, MASKED, GRAIN, BLOCK)
            coords = tile_coords(b, h, i0, j0, sizes, TRANSPOSED=True)
            sums = add_queries(
                sums, k_tile, v_tile, q, do, of_head,
                coords, band, mask, scores, dropout, sizes, MASKED, FUSED,
            )  # fmt: skip
    return sums


@triton.jit
def add_queries(
    sums, k_tile, v_tile, q, do, of_head,
    coords, band, mask, scores, dropout, sizes, MASKED: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Adds one query block to dk / scale and dv"""
    PRECISION: tl.constexpr = sizes.PRECISION
    i = coords.i0 + tl.arange(0, sizes.BLOCK_M)
    base, rest, delta = load_statistics(of_head, i, band.M, MASKED, FUSED)
    # Fully masked rows are not loaded: they may hold NaN, and 0 * NaN is NaN.
    live = base < float("inf")
    q_tile = load_rows(q, coords.i0, live, sizes.D, sizes.BLOCK_D, MASKED)
    do_tile = load_rows(do, coords.i0, live, sizes.D_V, sizes.BLOCK_DV, MASKED)
    bias = load_bias(scores, coords, band)
    relative = load_relative_rows(scores, coords, band, sizes)
    is_visible = None
    if MASKED:
        is_visible = visible(mask, band, coords)
    products = tile_products(q_tile, k_tile, relative, scores, sizes, TRANSPOSED=True)
    base, rest = base[None, :], rest[None, :]
    p = weights(products, base, rest, bias, is_visible, mask, scores, coords, band, FUSED)
    z = dropout_factor(dropout, coords, sizes, TRANSPOSED=True)
    dv = tl.dot((p * z).to(do_tile.dtype), do_tile, sums.dv, input_precision=PRECISION)
    dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION) * z
    ds = score_gradients(p, dp, delta[None, :], is_visible, mask)
    da = product_gradients(ds, products, scores)
    dk = tl.dot(da.to(q_tile.dtype), q_tile, sums.dk, input_precision=PRECISION)
    return KeyGradients(dk, dv)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def bwd_dq_kernel(
    q, k, v, do, statistics, dq,
    rows, M, N, low, high, offset, rows_k,
    heads, sequences, mask, lists, scores, dropout, sizes,
):  # fmt: skip
    """dq of a query block; tiles are (queries, keys)"""
    blocks = tl.cdiv(M, sizes.BLOCK_M)
    block = blocks - 1 - tl.program_id(0) % blocks
    h, b = program_head(blocks, heads.H_q)
    memory_b, first_q, first_k, own_M, own_N = sequence(sequences, b, M, N, rows, rows_k)
    band = sequence_band(mask, sequences, b, M, N, own_M, own_N, low, high, offset)
    i0 = block * sizes.BLOCK_M
    if i0 >= band.M:
        return

    i = i0 + tl.arange(0, sizes.BLOCK_M)
    FUSED: tl.constexpr = scores.plain_scale is not None and q.data.dtype.element_ty != tl.float32
    of_head = head_statistics(statistics, heads, rows, memory_b, h, first_q, FUSED)
    of_rows = load_statistics(of_head, i, band.M, True, FUSED)
    is_large = False
    if FUSED:
        is_large = is_any_large(of_rows.base)
    live = of_rows.base < float("inf")  # fully masked rows may hold NaN
    q_head, do_head = head(q, memory_b, h, first_q), head(do, memory_b, h, first_q)
    q_tile = load_rows(q_head, i0, live, sizes.D, sizes.BLOCK_D, True)
    do_tile = load_rows(do_head, i0, live, sizes.D_V, sizes.BLOCK_DV, True)
    k_head = head(k, memory_b, h // heads.group, first_k)
    v_head = head(v, memory_b, h // heads.group, first_k)
    ranges = key_block_ranges(band, i0, sizes.BLOCK_M, sizes.BLOCK_N)
    block = i0 // sizes.ROW_GRAIN
    schedule = block_schedule(ranges, lists, b, h, block, sizes.KEY_GRAIN, sizes.BLOCK_N)
    if is_large:
        of_head = head_statistics(statistics, heads, rows, memory_b, h, first_q, False)
        total = dq_of_keys(
            q_tile, do_tile, load_statistics(of_head, i, band.M, True, False), k_head, v_head,
            b, h, i0, schedule, lists, band, mask, scores, dropout, sizes, False, 1,
        )  # fmt: skip
    else:
        total = dq_of_keys(
            q_tile, do_tile, of_rows, k_head, v_head,
            b, h, i0, schedule, lists, band, mask, scores, dropout, sizes, FUSED, None,
        )  # fmt: skip
    total *= scores.scale
    store_rows(head(dq, memory_b, h, first_q), i0, i < band.M, total, sizes.D)


@triton.jit
def dq_of_keys(
    q_tile, do_tile, of_rows, k, v,
    b, h, i0, schedule, lists, band, mask, scores, dropout, sizes,
    FUSED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq / scale of a query block. Loops have other STAGES in one of the two branches that call
    this: with equal ones Triton merges their ends, and no longer shares their buffers."""
    GRAIN: tl.constexpr = sizes.KEY_GRAIN
    BLOCK: tl.constexpr = sizes.BLOCK_N
    total = tl.zeros([sizes.BLOCK_M, sizes.BLOCK_D], tl.float32)
    for MASKED in tl.static_range(2):
        begin, end = visits(schedule, MASKED)
        for n in tl.range(begin, end, num_stages=STAGES):
            j0 = block_start(schedule, lists, n, MASKED, GRAIN, BLOCK)
            coords = tile_coords(b, h, i0, j0, sizes, TRANSPOSED=False)
            total = add_keys(
                total, q_tile, do_tile, of_rows, k, v,
                coords, band, mask, scores, dropout, sizes, MASKED, FUSED,
            )  # fmt: skip
    return total


@triton.jit
def add_keys(
    total, q_tile, do_tile, of_rows, k, v,
    coords, band, mask, scores, dropout, sizes, MASKED: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Adds one key block to dq / scale"""
    PRECISION: tl.constexpr = sizes.PRECISION
    live = is_live(coords.j0 + tl.arange(0, sizes.BLOCK_N), band)
    k_tile = load_rows(k, coords.j0, live, sizes.D, sizes.BLOCK_D, MASKED)
    v_tile = load_rows(v, coords.j0, live, sizes.D_V, sizes.BLOCK_DV, MASKED)
    bias = load_bias(scores, coords, band)
    relative = load_relative_rows(scores, coords, band, sizes)
    is_visible = None
    if MASKED:
        is_visible = visible(mask, band, coords)
    products = tile_products(q_tile, k_tile, relative, scores, sizes, TRANSPOSED=False)
    base, rest = of_rows.base[:, None], of_rows.rest[:, None]
    p = weights(products, base, rest, bias, is_visible, mask, scores, coords, band, FUSED)
    z = dropout_factor(dropout, coords, sizes, TRANSPOSED=False)
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION) * z
    ds = score_gradients(p, dp, of_rows.delta[:, None], is_visible, mask)
    da = product_gradients(ds, products, scores)
    k_tile = zero_hidden_keys(k_tile, is_visible, mask)
    total = tl.dot(da.to(k_tile.dtype), k_tile, total, input_precision=PRECISION)
    return add_relative_rows(total, da, relative, scores, sizes)
