"""The forward kernel: one program a block of queries, online softmax over the keys it sees.

    s   = log2(e) * (scale q k^T, capped, biased; -inf where hidden)
    m'  = max(m, max_j s),  p = 2^(s - m')
    l   = l 2^(m - m') + sum_j p,  o = o 2^(m - m') + z p v
    o / l is the output, and ln(2) (m + log2 l) is lse

docs/attention.md, sections 2 and 5.
"""

import triton
import triton.language as tl

from transformer_kernels.backends.triton.kernels.dropout import kept
from transformer_kernels.backends.triton.kernels.masks import (
    block_start,
    is_used,
    key_range,
    key_spans,
    visible,
    visits,
    without_unseen,
)
from transformer_kernels.backends.triton.kernels.primitives import (
    NUMBERS,
    exponents,
    from_start,
    load_bias,
    load_rows,
    logarithm,
    matrix,
    power,
    sequence,
    store_rows,
    vector,
)


@triton.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    q,
    k,
    v,
    o,
    lse,
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
    # The last blocks of queries first: under a causal mask they are the longest.
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

    EXACT: tl.constexpr = q.data.dtype.element_ty == tl.float32
    i = i0 + tl.arange(0, BLOCK_M)
    q_tile = load_rows(
        matrix(q, at_b, h, first_q), q.stride_l, i0, i < M, BLOCK_M, D, BLOCK_D, True
    )
    k_head = matrix(k, at_b, h // heads.group, first_k)
    v_head = matrix(v, at_b, h // heads.group, first_k)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    spans = key_spans(low, high, begin, end, i0, M, BLOCK_M, BLOCK_N)
    in_part, part_from, before, gap, in_full, full_from, row = visits(
        spans, lists, b, h, i0 // ROW_GRAIN, KEY_GRAIN, BLOCK_N
    )
    for n in range(full_from, full_from + in_full):
        j0 = block_start(lists, row, n, KEY_GRAIN, BLOCK_N)
        m_i, l_i, acc = attend(
            q_tile, k_head, v_head, k.stride_l, v.stride_l, m_i, l_i, acc,
            low, high, begin, end, offset, mask, scores, dropout, b, h, i0, j0, M, N,
            D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, EXACT, IN_PART=False,
        )  # fmt: skip
    for t in range(in_part):
        n = part_from + t + tl.where(t < before, 0, gap)
        j0 = block_start(lists, row, n, KEY_GRAIN, BLOCK_N)
        m_i, l_i, acc = attend(
            q_tile, k_head, v_head, k.stride_l, v.stride_l, m_i, l_i, acc,
            low, high, begin, end, offset, mask, scores, dropout, b, h, i0, j0, M, N,
            D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, EXACT, IN_PART=True,
        )  # fmt: skip

    empty = l_i == 0.0
    total = tl.where(empty, 1.0, l_i)
    acc *= (dropout.factor / total)[:, None]
    store_rows(matrix(o, at_b, h, first_q), o.stride_l, i0, i < M, acc, D_V)
    lse_i = tl.where(empty, float("-inf"), logarithm(m_i, total, EXACT))
    tl.store(vector(lse, heads, rows, at_b, h, first_q) + i, lse_i, mask=i < M)


@triton.jit
def attend(
    q_tile,
    k_head,
    v_head,
    k_stride,
    v_stride,
    m_i,
    l_i,
    acc,
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
    EXACT: tl.constexpr,
    IN_PART: tl.constexpr,
):
    """The softmax state (m_i, l_i, acc) after one more block of keys"""
    j = j0 + tl.arange(0, BLOCK_N)
    i_column, j_row = (i0 + tl.arange(0, BLOCK_M))[:, None], j[None, :]
    used = is_used(j, low, high, begin, end, M)
    k_tile = load_rows(k_head, k_stride, j0, used, BLOCK_N, D, BLOCK_D, IN_PART)
    # Loads of scores' shape come before the product: see section 4 of docs/triton.md.
    bias, shown = None, None
    if scores.bias is not None:
        bias = load_bias(scores, b, h, i_column, j_row, M, N)
    if IN_PART:
        shown = visible(mask, low, high, begin, end, b, h, i_column, j_row, M, N)
    products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    s = exponents(products, bias, scores, offset, h, i_column, j_row, EXACT)
    if scores.plain_scale is not None and not IN_PART:
        # One product a row instead of one a score: the scale is not negative (launch.py).
        largest = exponents(tl.max(products, 1), None, scores, offset, h, 0, 0, EXACT)
    v_tile = load_rows(v_head, v_stride, j0, used, BLOCK_N, D_V, BLOCK_DV, IN_PART)
    if IN_PART:
        s = tl.where(shown, s, float("-inf"))
        v_tile = without_unseen(v_tile, shown, mask)

    if scores.plain_scale is None or IN_PART:
        largest = tl.max(s, 1)
    m_new = tl.maximum(m_i, largest)
    if IN_PART or scores.bias is not None:
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet
    else:
        base = m_new
    p = power(s - base[:, None], EXACT)
    decay = power(m_i - base, EXACT)
    l_i = l_i * decay + tl.sum(p, 1)
    if dropout.seed is not None:
        p = tl.where(kept(dropout, b, h, i0, j0, BLOCK_M, BLOCK_N), p, 0.0)
    acc = acc * decay[:, None]
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    return m_new, l_i, acc
