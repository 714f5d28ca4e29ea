"""Forward kernel: one program per query block, online softmax over its visible key blocks.

    s   = q k^T; with score options: scale q k^T, capped, biased; -inf where hidden
    m'  = max(m, max_j s),  p = 2^(unit (s - m'))
    l   = l 2^(unit (m - m')) + sum_j p,  o = o 2^(unit (m - m')) + z p v
    output = o / l,  lse = unit ln(2) m + log l

unit is log2(e), or log2(e) scale. m is subtracted before the multiplication: exponents are never
positive, and those of large scores are exact near 0. docs/attention.md, sections 2, 5 and 8.
"""

import triton
import triton.language as tl

from transformer_kernels.backends.triton.kernels.dropout import keep_mask
from transformer_kernels.backends.triton.kernels.masks import (
    block_schedule,
    block_start,
    is_live,
    key_block_ranges,
    key_range,
    visible,
    zero_hidden_keys,
)
from transformer_kernels.backends.triton.kernels.primitives import (
    LN2,
    UNSPECIALIZED,
    head_pointer,
    load_bias,
    load_rows,
    log2_unit,
    natural_unit,
    resolve_alignment,
    sequence,
    store_rows,
    unscaled_scores,
    vector_pointer,
)


@triton.jit(do_not_specialize=UNSPECIALIZED)
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
    # Last query blocks first: under a causal mask they have the most work.
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
    q_tile = load_rows(
        head_pointer(q, memory_b, h, first_q), q.stride_l, i0, i < M, BLOCK_M, D, BLOCK_D, True
    )
    k_head = head_pointer(k, memory_b, h // heads.group, first_k)
    v_head = head_pointer(v, memory_b, h // heads.group, first_k)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    block_ranges = key_block_ranges(low, high, begin, end, i0, M, BLOCK_M, BLOCK_N)
    num_partial, first_partial, before, gap, num_full, first_full, row = block_schedule(
        block_ranges, lists, b, h, i0 // ROW_GRAIN, KEY_GRAIN, BLOCK_N
    )
    for n in range(first_full, first_full + num_full):
        j0 = block_start(lists, row, n, KEY_GRAIN, BLOCK_N)
        m_i, l_i, acc = attend(
            q_tile, k_head, v_head, k.stride_l, v.stride_l, m_i, l_i, acc,
            low, high, begin, end, offset, mask, scores, dropout, b, h, i0, j0, M, N,
            D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, MASKED=False,
        )  # fmt: skip
    for t in range(num_partial):
        n = first_partial + t + tl.where(t < before, 0, gap)
        j0 = block_start(lists, row, n, KEY_GRAIN, BLOCK_N)
        m_i, l_i, acc = attend(
            q_tile, k_head, v_head, k.stride_l, v.stride_l, m_i, l_i, acc,
            low, high, begin, end, offset, mask, scores, dropout, b, h, i0, j0, M, N,
            D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, MASKED=True,
        )  # fmt: skip

    empty = l_i == 0.0
    total = tl.where(empty, 1.0, l_i)
    acc *= (dropout.factor / total)[:, None]
    store_rows(head_pointer(o, memory_b, h, first_q), o.stride_l, i0, i < M, acc, D_V)
    lse_i = m_i * natural_unit(scores) + tl.log2(total) * LN2
    lse_i = tl.where(empty, float("-inf"), lse_i)
    tl.store(vector_pointer(lse, heads, rows, memory_b, h, first_q) + i, lse_i, mask=i < M)


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
    MASKED: tl.constexpr,
):
    """Updates the softmax state (m_i, l_i, acc) with one key block"""
    j = j0 + tl.arange(0, BLOCK_N)
    i_column, j_row = (i0 + tl.arange(0, BLOCK_M))[:, None], j[None, :]
    live = is_live(j, low, high, begin, end, M)
    k_tile = load_rows(k_head, k_stride, j0, live, BLOCK_N, D, BLOCK_D, MASKED)
    # Per-score loads must precede the product: docs/triton.md, section 4.
    bias, is_visible = None, None
    if scores.bias is not None:
        bias = load_bias(scores, b, h, i_column, j_row, M, N)
    if MASKED:
        is_visible = visible(mask, low, high, begin, end, b, h, i_column, j_row, M, N)
    products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    s = unscaled_scores(products, bias, scores, offset, h, i_column, j_row)
    v_tile = load_rows(v_head, v_stride, j0, live, BLOCK_N, D_V, BLOCK_DV, MASKED)
    if MASKED:
        s = tl.where(is_visible, s, float("-inf"))
        v_tile = zero_hidden_keys(v_tile, is_visible, mask)

    m_new = tl.maximum(m_i, tl.max(s, 1))
    if MASKED or scores.bias is not None:
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # no visible key so far
    else:
        base = m_new
    p = tl.exp2((s - base[:, None]) * log2_unit(scores))
    decay = tl.exp2((m_i - base) * log2_unit(scores))
    l_i = l_i * decay + tl.sum(p, 1)
    if dropout.seed is not None:
        p = tl.where(keep_mask(dropout, b, h, i0, j0, BLOCK_M, BLOCK_N), p, 0.0)
    acc = acc * decay[:, None]
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    return m_new, l_i, acc
