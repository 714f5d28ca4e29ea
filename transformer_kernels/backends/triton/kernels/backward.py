"""Backward kernels: bwd_dkdv runs one program per key block, bwd_dq one per query block.

    dv = (z p)^T do,  dk = scale da^T q,  dq = scale da k

Both recompute the weights from q, k and lse (`base`). One program sums each gradient in a fixed
order, dk and dv also over the query heads of their group. There are no atomics, so gradients are
bit-identical from run to run.
docs/attention.md, section 3.
"""

import triton
import triton.language as tl

from transformer_kernels.backends.triton.kernels.masks import (
    block_schedule,
    block_start,
    is_live,
    key_block_ranges,
    key_range,
    query_block_ranges,
    visible,
    zero_hidden_keys,
)
from transformer_kernels.backends.triton.kernels.primitives import (
    UNSPECIALIZED,
    head_pointer,
    load_bias,
    load_rows,
    resolve_alignment,
    sequence,
    store_rows,
    vector_pointer,
)
from transformer_kernels.backends.triton.kernels.score_gradient import (
    dropout_factor,
    load_statistics,
    product_gradients,
    score_gradients,
    weights,
)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def bwd_dkdv_kernel(
    q,
    k,
    v,
    do,
    base,
    delta,
    dk,
    dv,
    rows,
    M,
    N,
    low,
    high,
    offset,
    rows_k,
    heads,
    sequences,
    mask,
    lists,
    scores,
    dropout,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROW_GRAIN: tl.constexpr,
    KEY_GRAIN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dv of a key block; tiles are (keys, queries)"""
    blocks = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    H_kv = heads.H_q // heads.group
    h_kv = program // blocks % H_kv
    b = program // blocks // H_kv
    memory_b, first_q, first_k, M, N = sequence(sequences, b, M, N, rows, rows_k)
    low, high, offset = resolve_alignment(sequences, low, high, offset, M, N)
    begin, end = key_range(mask, b, N)
    j0 = program % blocks * BLOCK_N
    if j0 >= N:
        return

    j = j0 + tl.arange(0, BLOCK_N)
    live = is_live(j, low, high, begin, end, M)
    k_head, v_head = (
        head_pointer(k, memory_b, h_kv, first_k),
        head_pointer(v, memory_b, h_kv, first_k),
    )
    k_tile = load_rows(k_head, k.stride_l, j0, live, BLOCK_N, D, BLOCK_D, True)
    v_tile = load_rows(v_head, v.stride_l, j0, live, BLOCK_N, D_V, BLOCK_DV, True)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    block_ranges = query_block_ranges(low, high, begin, end, j0, M, BLOCK_M, BLOCK_N)
    for h in range(h_kv * heads.group, (h_kv + 1) * heads.group):
        q_head, do_head = (
            head_pointer(q, memory_b, h, first_q),
            head_pointer(do, memory_b, h, first_q),
        )
        base_rows, delta_rows = (
            vector_pointer(base, heads, rows, memory_b, h, first_q),
            vector_pointer(delta, heads, rows, memory_b, h, first_q),
        )
        num_partial, first_partial, before, gap, num_full, first_full, row = block_schedule(
            block_ranges, lists, b, h, j0 // KEY_GRAIN, ROW_GRAIN, BLOCK_M
        )
        for n in range(first_full, first_full + num_full):
            i0 = block_start(lists, row, n, ROW_GRAIN, BLOCK_M)
            dk_acc, dv_acc = add_queries(
                dk_acc, dv_acc, k_tile, v_tile, q_head, do_head, q.stride_l, do.stride_l,
                base_rows, delta_rows, low, high, begin, end, offset, mask, scores, dropout,
                b, h, i0, j0, M, N,
                D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, MASKED=False,
            )  # fmt: skip
        for t in range(num_partial):
            n = first_partial + t + tl.where(t < before, 0, gap)
            i0 = block_start(lists, row, n, ROW_GRAIN, BLOCK_M)
            dk_acc, dv_acc = add_queries(
                dk_acc, dv_acc, k_tile, v_tile, q_head, do_head, q.stride_l, do.stride_l,
                base_rows, delta_rows, low, high, begin, end, offset, mask, scores, dropout,
                b, h, i0, j0, M, N,
                D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, MASKED=True,
            )  # fmt: skip
    dk_acc *= scores.scale
    store_rows(head_pointer(dk, memory_b, h_kv, first_k), dk.stride_l, j0, j < N, dk_acc, D)
    store_rows(head_pointer(dv, memory_b, h_kv, first_k), dv.stride_l, j0, j < N, dv_acc, D_V)


@triton.jit
def add_queries(
    dk_acc,
    dv_acc,
    k_tile,
    v_tile,
    q_head,
    do_head,
    q_stride,
    do_stride,
    base_rows,
    delta_rows,
    low,
    high,
    begin,
    end,
    offset,
    mask,
    scores,
    dropout,
    b,
    h,
    i0,
    j0,
    M,
    N,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds one query block to dk / scale and dv"""
    i = i0 + tl.arange(0, BLOCK_M)
    i_row, j_column = i[None, :], (j0 + tl.arange(0, BLOCK_N))[:, None]
    base, delta = load_statistics(base_rows, delta_rows, i, M, MASKED)
    # Fully masked rows are not loaded: they may hold NaN, and 0 * NaN is NaN.
    row_is_live = base < float("inf")
    q_tile = load_rows(q_head, q_stride, i0, row_is_live, BLOCK_M, D, BLOCK_D, MASKED)
    do_tile = load_rows(do_head, do_stride, i0, row_is_live, BLOCK_M, D_V, BLOCK_DV, MASKED)
    bias, is_visible = None, None
    if scores.bias is not None:
        bias = load_bias(scores, b, h, i_row, j_column, M, N)
    if MASKED:
        is_visible = visible(mask, low, high, begin, end, b, h, i_row, j_column, M, N)
    products = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
    p = weights(
        products, base[None, :], bias, is_visible, mask, scores, offset, h, i_row, j_column,
    )  # fmt: skip
    z = dropout_factor(dropout, b, h, i0, j0, BLOCK_M, BLOCK_N, TRANSPOSED=True)
    dv_acc = tl.dot((p * z).to(do_tile.dtype), do_tile, dv_acc, input_precision=PRECISION)
    dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION) * z
    ds = score_gradients(p, dp, delta[None, :], is_visible, mask)
    da = product_gradients(ds, products, scores)
    dk_acc = tl.dot(da.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
    return dk_acc, dv_acc


@triton.jit(do_not_specialize=UNSPECIALIZED)
def bwd_dq_kernel(
    q,
    k,
    v,
    do,
    base,
    delta,
    dq,
    rows,
    M,
    N,
    low,
    high,
    offset,
    rows_k,
    heads,
    sequences,
    mask,
    lists,
    scores,
    dropout,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROW_GRAIN: tl.constexpr,
    KEY_GRAIN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq of a query block; tiles are (queries, keys)"""
    blocks = tl.cdiv(M, BLOCK_M)
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks
    h = program // blocks % heads.H_q
    b = program // blocks // heads.H_q
    memory_b, first_q, first_k, M, N = sequence(sequences, b, M, N, rows, rows_k)
    low, high, offset = resolve_alignment(sequences, low, high, offset, M, N)
    begin, end = key_range(mask, b, N)
    i0 = block * BLOCK_M
    if i0 >= M:
        return

    i = i0 + tl.arange(0, BLOCK_M)
    base_i, delta_i = load_statistics(
        vector_pointer(base, heads, rows, memory_b, h, first_q),
        vector_pointer(delta, heads, rows, memory_b, h, first_q),
        i,
        M,
        True,
    )
    row_is_live = base_i < float("inf")  # fully masked rows may hold NaN
    q_head, do_head = head_pointer(q, memory_b, h, first_q), head_pointer(do, memory_b, h, first_q)
    q_tile = load_rows(q_head, q.stride_l, i0, row_is_live, BLOCK_M, D, BLOCK_D, True)
    do_tile = load_rows(do_head, do.stride_l, i0, row_is_live, BLOCK_M, D_V, BLOCK_DV, True)
    k_head = head_pointer(k, memory_b, h // heads.group, first_k)
    v_head = head_pointer(v, memory_b, h // heads.group, first_k)
    dq_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    block_ranges = key_block_ranges(low, high, begin, end, i0, M, BLOCK_M, BLOCK_N)
    num_partial, first_partial, before, gap, num_full, first_full, row = block_schedule(
        block_ranges, lists, b, h, i0 // ROW_GRAIN, KEY_GRAIN, BLOCK_N
    )
    for n in range(first_full, first_full + num_full):
        j0 = block_start(lists, row, n, KEY_GRAIN, BLOCK_N)
        dq_acc = add_keys(
            dq_acc, q_tile, do_tile, k_head, v_head, k.stride_l, v.stride_l, base_i, delta_i,
            low, high, begin, end, offset, mask, scores, dropout, b, h, i0, j0, M, N,
            D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, MASKED=False,
        )  # fmt: skip
    for t in range(num_partial):
        n = first_partial + t + tl.where(t < before, 0, gap)
        j0 = block_start(lists, row, n, KEY_GRAIN, BLOCK_N)
        dq_acc = add_keys(
            dq_acc, q_tile, do_tile, k_head, v_head, k.stride_l, v.stride_l, base_i, delta_i,
            low, high, begin, end, offset, mask, scores, dropout, b, h, i0, j0, M, N,
            D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, MASKED=True,
        )  # fmt: skip
    dq_acc *= scores.scale
    store_rows(head_pointer(dq, memory_b, h, first_q), dq.stride_l, i0, i < M, dq_acc, D)


@triton.jit
def add_keys(
    dq_acc,
    q_tile,
    do_tile,
    k_head,
    v_head,
    k_stride,
    v_stride,
    base,
    delta,
    low,
    high,
    begin,
    end,
    offset,
    mask,
    scores,
    dropout,
    b,
    h,
    i0,
    j0,
    M,
    N,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds one key block to dq / scale"""
    j = j0 + tl.arange(0, BLOCK_N)
    i_column, j_row = (i0 + tl.arange(0, BLOCK_M))[:, None], j[None, :]
    live = is_live(j, low, high, begin, end, M)
    k_tile = load_rows(k_head, k_stride, j0, live, BLOCK_N, D, BLOCK_D, MASKED)
    v_tile = load_rows(v_head, v_stride, j0, live, BLOCK_N, D_V, BLOCK_DV, MASKED)
    bias, is_visible = None, None
    if scores.bias is not None:
        bias = load_bias(scores, b, h, i_column, j_row, M, N)
    if MASKED:
        is_visible = visible(mask, low, high, begin, end, b, h, i_column, j_row, M, N)
    products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    p = weights(
        products, base[:, None], bias, is_visible, mask, scores, offset, h, i_column, j_row,
    )  # fmt: skip
    z = dropout_factor(dropout, b, h, i0, j0, BLOCK_M, BLOCK_N, TRANSPOSED=False)
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION) * z
    ds = score_gradients(p, dp, delta[:, None], is_visible, mask)
    da = product_gradients(ds, products, scores)
    if MASKED:
        k_tile = zero_hidden_keys(k_tile, is_visible, mask)
    return tl.dot(da.to(k_tile.dtype), k_tile, dq_acc, input_precision=PRECISION)
