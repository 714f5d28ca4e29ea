"""Gradient of a dense bias: ds, summed over the broadcast dimensions of the bias.

- Bias with rows and columns: one program per tile sums over the batch entries and heads.
- Bias with columns only: one program per key block, batch entry and head.
- Bias without columns: no kernel, since each row of ds sums to dlse.

Scores are recomputed; sums run in a fixed order, without atomics. docs/attention.md, section 3.
"""

import triton
import triton.language as tl

from transformer_kernels.backends.triton.kernels.masks import (
    is_live,
    key_block_ranges,
    key_range,
    query_block_ranges,
    visible,
)
from transformer_kernels.backends.triton.kernels.primitives import (
    UNSPECIALIZED,
    head_pointer,
    load_bias,
    load_rows,
    vector_pointer,
)
from transformer_kernels.backends.triton.kernels.score_gradient import (
    dropout_factor,
    load_statistics,
    score_gradients,
    weights,
)


@triton.jit
def tile_gradients(
    q,
    k,
    v,
    do,
    base,
    delta,
    rows,
    M,
    N,
    low,
    high,
    offset,
    heads,
    mask,
    scores,
    dropout,
    b,
    h,
    i0,
    j0,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ds of a tile, 0 where hidden"""
    i, j = i0 + tl.arange(0, BLOCK_M), j0 + tl.arange(0, BLOCK_N)
    begin, end = key_range(mask, b, N)
    live = is_live(j, low, high, begin, end, M)
    q_head, do_head = head_pointer(q, b, h, 0), head_pointer(do, b, h, 0)
    k_head, v_head = (
        head_pointer(k, b, h // heads.group, 0),
        head_pointer(v, b, h // heads.group, 0),
    )
    base_rows, delta_rows = (
        vector_pointer(base, heads, rows, b, h, 0),
        vector_pointer(delta, heads, rows, b, h, 0),
    )
    base_i, delta_i = load_statistics(base_rows, delta_rows, i, M, True)
    row_is_live = base_i < float("inf")
    q_tile = load_rows(q_head, q.stride_l, i0, row_is_live, BLOCK_M, D, BLOCK_D, True)
    k_tile = load_rows(k_head, k.stride_l, j0, live, BLOCK_N, D, BLOCK_D, True)
    bias = load_bias(scores, b, h, i[:, None], j[None, :], M, N)
    is_visible = visible(mask, low, high, begin, end, b, h, i[:, None], j[None, :], M, N)
    products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    p = weights(
        products, base_i[:, None], bias, is_visible, mask, scores, offset, h,
        i[:, None], j[None, :],
    )  # fmt: skip
    do_tile = load_rows(do_head, do.stride_l, i0, row_is_live, BLOCK_M, D_V, BLOCK_DV, True)
    v_tile = load_rows(v_head, v.stride_l, j0, live, BLOCK_N, D_V, BLOCK_DV, True)
    z = dropout_factor(dropout, b, h, i0, j0, BLOCK_M, BLOCK_N, TRANSPOSED=False)
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION) * z
    return score_gradients(p, dp, delta_i[:, None], is_visible, mask)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "B", "own_b", "own_h"])
def tile_sums_kernel(
    q,
    k,
    v,
    do,
    base,
    delta,
    dbias,
    rows,
    M,
    N,
    low,
    high,
    offset,
    heads,
    mask,
    scores,
    dropout,
    B,
    own_b,
    own_h,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dbias (own_b, own_h, M, N), with own_b = B or 1 and own_h = H_q or 1"""
    row_blocks, column_blocks = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    j0 = program % column_blocks * BLOCK_N
    i0 = program // column_blocks % row_blocks * BLOCK_M
    first_h = program // column_blocks // row_blocks % own_h
    first_b = program // column_blocks // row_blocks // own_h
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for b in range(first_b, B, own_b):
        begin, end = key_range(mask, b, N)
        any_begin, _, _, any_end = key_block_ranges(low, high, begin, end, i0, M, BLOCK_M, BLOCK_N)
        if (j0 >= any_begin * BLOCK_N) & (j0 < any_end * BLOCK_N):
            for h in range(first_h, heads.H_q, own_h):
                total += tile_gradients(
                    q, k, v, do, base, delta, rows, M, N, low, high, offset, heads, mask, scores,
                    dropout, b, h, i0, j0,
                    D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
                )  # fmt: skip
    i, j = i0 + tl.arange(0, BLOCK_M)[:, None], j0 + tl.arange(0, BLOCK_N)[None, :]
    at = head_pointer(dbias, first_b, first_h, 0) + i.to(tl.int64) * dbias.stride_l + j
    tl.store(at, total.to(dbias.data.dtype.element_ty), mask=(i < M) & (j < N))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def column_sums_kernel(
    q,
    k,
    v,
    do,
    base,
    delta,
    sums,
    rows,
    M,
    N,
    low,
    high,
    offset,
    heads,
    mask,
    scores,
    dropout,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """sums (B, H_q, N) float32: ds summed over the queries"""
    blocks = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    h = program // blocks % heads.H_q
    b = program // blocks // heads.H_q
    j0 = program % blocks * BLOCK_N
    total = tl.zeros([BLOCK_N], tl.float32)
    begin, end = key_range(mask, b, N)
    any_begin, _, _, any_end = query_block_ranges(low, high, begin, end, j0, M, BLOCK_M, BLOCK_N)
    for block in range(any_begin, any_end):
        ds = tile_gradients(
            q, k, v, do, base, delta, rows, M, N, low, high, offset, heads, mask, scores, dropout,
            b, h, block * BLOCK_M, j0,
            D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
        total += tl.sum(ds, 0)
    j = j0 + tl.arange(0, BLOCK_N)
    tl.store(vector_pointer(sums, heads, N, b, h, 0) + j, total, mask=j < N)
