"""The backward kernels: dk and dv by blocks of keys, dq by blocks of queries.

    dv = (z p)^T do,  dk = scale da^T q,  dq = scale da k

Weights are computed again from q, k and lse (`base`), in both. Each gradient is summed by one
program in a fixed order, dk and dv over the query heads of their group too: the same bits in every
run, and no atomics.
docs/attention.md, section 3.
"""

import triton
import triton.language as tl

from transformer_kernels.backends.triton.kernels.masks import (
    block_start,
    is_used,
    key_range,
    key_spans,
    query_spans,
    visible,
    visits,
    without_unseen,
)
from transformer_kernels.backends.triton.kernels.primitives import (
    NUMBERS,
    from_start,
    load_bias,
    load_rows,
    matrix,
    sequence,
    store_rows,
    vector,
)
from transformer_kernels.backends.triton.kernels.score_gradient import (
    dropout_factor,
    load_statistics,
    product_gradients,
    score_gradients,
    weights,
)


@triton.jit(do_not_specialize=NUMBERS)
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
    """dk and dv of a block of keys; tiles are (keys, queries)"""
    blocks = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    H_kv = heads.H_q // heads.group
    h_kv = program // blocks % H_kv
    b = program // blocks // H_kv
    at_b, first_q, first_k, M, N = sequence(sequences, b, M, N)
    low, high, offset = from_start(sequences, low, high, offset, M, N)
    begin, end = key_range(mask, b, N)
    j0 = program % blocks * BLOCK_N
    if j0 >= N:
        return

    j = j0 + tl.arange(0, BLOCK_N)
    used = is_used(j, low, high, begin, end, M)
    k_head, v_head = matrix(k, at_b, h_kv, first_k), matrix(v, at_b, h_kv, first_k)
    k_tile = load_rows(k_head, k.stride_l, j0, used, BLOCK_N, D, BLOCK_D, True)
    v_tile = load_rows(v_head, v.stride_l, j0, used, BLOCK_N, D_V, BLOCK_DV, True)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    spans = query_spans(low, high, begin, end, j0, M, BLOCK_M, BLOCK_N)
    for h in range(h_kv * heads.group, (h_kv + 1) * heads.group):
        q_head, do_head = matrix(q, at_b, h, first_q), matrix(do, at_b, h, first_q)
        base_rows, delta_rows = (
            vector(base, heads, rows, at_b, h, first_q),
            vector(delta, heads, rows, at_b, h, first_q),
        )
        in_part, part_from, before, gap, in_full, full_from, row = visits(
            spans, lists, b, h, j0 // KEY_GRAIN, ROW_GRAIN, BLOCK_M
        )
        for n in range(full_from, full_from + in_full):
            i0 = block_start(lists, row, n, ROW_GRAIN, BLOCK_M)
            dk_acc, dv_acc = add_queries(
                dk_acc, dv_acc, k_tile, v_tile, q_head, do_head, q.stride_l, do.stride_l,
                base_rows, delta_rows, low, high, begin, end, offset, mask, scores, dropout,
                b, h, i0, j0, M, N,
                D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, IN_PART=False,
            )  # fmt: skip
        for t in range(in_part):
            n = part_from + t + tl.where(t < before, 0, gap)
            i0 = block_start(lists, row, n, ROW_GRAIN, BLOCK_M)
            dk_acc, dv_acc = add_queries(
                dk_acc, dv_acc, k_tile, v_tile, q_head, do_head, q.stride_l, do.stride_l,
                base_rows, delta_rows, low, high, begin, end, offset, mask, scores, dropout,
                b, h, i0, j0, M, N,
                D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, IN_PART=True,
            )  # fmt: skip
    dk_acc *= scores.scale
    store_rows(matrix(dk, at_b, h_kv, first_k), dk.stride_l, j0, j < N, dk_acc, D)
    store_rows(matrix(dv, at_b, h_kv, first_k), dv.stride_l, j0, j < N, dv_acc, D_V)


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
    IN_PART: tl.constexpr,
):
    """dk / scale and dv, with what one more block of queries adds"""
    i = i0 + tl.arange(0, BLOCK_M)
    i_row, j_column = i[None, :], (j0 + tl.arange(0, BLOCK_N))[:, None]
    base, delta = load_statistics(base_rows, delta_rows, i, M, IN_PART)
    # A query that sees nothing may hold NaN, and 0 * NaN is NaN: it is not loaded.
    sees = base < float("inf")
    q_tile = load_rows(q_head, q_stride, i0, sees, BLOCK_M, D, BLOCK_D, IN_PART)
    do_tile = load_rows(do_head, do_stride, i0, sees, BLOCK_M, D_V, BLOCK_DV, IN_PART)
    bias, shown = None, None
    if scores.bias is not None:
        bias = load_bias(scores, b, h, i_row, j_column, M, N)
    if IN_PART:
        shown = visible(mask, low, high, begin, end, b, h, i_row, j_column, M, N)
    products = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
    p = weights(
        products, base[None, :], bias, shown, mask, scores, offset, h, i_row, j_column,
        EXACT=k_tile.dtype == tl.float32,
    )  # fmt: skip
    z = dropout_factor(dropout, b, h, i0, j0, BLOCK_M, BLOCK_N, TRANSPOSED=True)
    dv_acc = tl.dot((p * z).to(do_tile.dtype), do_tile, dv_acc, input_precision=PRECISION)
    dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION) * z
    ds = score_gradients(p, dp, delta[None, :], shown, mask)
    da = product_gradients(ds, products, scores)
    dk_acc = tl.dot(da.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
    return dk_acc, dv_acc


@triton.jit(do_not_specialize=NUMBERS)
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
    """dq of a block of queries; tiles are (queries, keys)"""
    blocks = tl.cdiv(M, BLOCK_M)
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks
    h = program // blocks % heads.H_q
    b = program // blocks // heads.H_q
    at_b, first_q, first_k, M, N = sequence(sequences, b, M, N)
    low, high, offset = from_start(sequences, low, high, offset, M, N)
    begin, end = key_range(mask, b, N)
    i0 = block * BLOCK_M
    if i0 >= M:
        return

    i = i0 + tl.arange(0, BLOCK_M)
    base_i, delta_i = load_statistics(
        vector(base, heads, rows, at_b, h, first_q),
        vector(delta, heads, rows, at_b, h, first_q),
        i,
        M,
        True,
    )
    sees = base_i < float("inf")  # the others may hold NaN
    q_head, do_head = matrix(q, at_b, h, first_q), matrix(do, at_b, h, first_q)
    q_tile = load_rows(q_head, q.stride_l, i0, sees, BLOCK_M, D, BLOCK_D, True)
    do_tile = load_rows(do_head, do.stride_l, i0, sees, BLOCK_M, D_V, BLOCK_DV, True)
    k_head = matrix(k, at_b, h // heads.group, first_k)
    v_head = matrix(v, at_b, h // heads.group, first_k)
    dq_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    spans = key_spans(low, high, begin, end, i0, M, BLOCK_M, BLOCK_N)
    in_part, part_from, before, gap, in_full, full_from, row = visits(
        spans, lists, b, h, i0 // ROW_GRAIN, KEY_GRAIN, BLOCK_N
    )
    for n in range(full_from, full_from + in_full):
        j0 = block_start(lists, row, n, KEY_GRAIN, BLOCK_N)
        dq_acc = add_keys(
            dq_acc, q_tile, do_tile, k_head, v_head, k.stride_l, v.stride_l, base_i, delta_i,
            low, high, begin, end, offset, mask, scores, dropout, b, h, i0, j0, M, N,
            D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, IN_PART=False,
        )  # fmt: skip
    for t in range(in_part):
        n = part_from + t + tl.where(t < before, 0, gap)
        j0 = block_start(lists, row, n, KEY_GRAIN, BLOCK_N)
        dq_acc = add_keys(
            dq_acc, q_tile, do_tile, k_head, v_head, k.stride_l, v.stride_l, base_i, delta_i,
            low, high, begin, end, offset, mask, scores, dropout, b, h, i0, j0, M, N,
            D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, IN_PART=True,
        )  # fmt: skip
    dq_acc *= scores.scale
    store_rows(matrix(dq, at_b, h, first_q), dq.stride_l, i0, i < M, dq_acc, D)


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
    IN_PART: tl.constexpr,
):
    """dq / scale, with what one more block of keys adds"""
    j = j0 + tl.arange(0, BLOCK_N)
    i_column, j_row = (i0 + tl.arange(0, BLOCK_M))[:, None], j[None, :]
    used = is_used(j, low, high, begin, end, M)
    k_tile = load_rows(k_head, k_stride, j0, used, BLOCK_N, D, BLOCK_D, IN_PART)
    v_tile = load_rows(v_head, v_stride, j0, used, BLOCK_N, D_V, BLOCK_DV, IN_PART)
    bias, shown = None, None
    if scores.bias is not None:
        bias = load_bias(scores, b, h, i_column, j_row, M, N)
    if IN_PART:
        shown = visible(mask, low, high, begin, end, b, h, i_column, j_row, M, N)
    products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    p = weights(
        products, base[:, None], bias, shown, mask, scores, offset, h, i_column, j_row,
        EXACT=k_tile.dtype == tl.float32,
    )  # fmt: skip
    z = dropout_factor(dropout, b, h, i0, j0, BLOCK_M, BLOCK_N, TRANSPOSED=False)
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION) * z
    ds = score_gradients(p, dp, delta[:, None], shown, mask)
    da = product_gradients(ds, products, scores)
    if IN_PART:
        k_tile = without_unseen(k_tile, shown, mask)
    return tl.dot(da.to(k_tile.dtype), k_tile, dq_acc, input_precision=PRECISION)
