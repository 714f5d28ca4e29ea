"""Products of the pairs of tokens of a chunk, and the inverse of its triangular system.

    X_ij = G_ij k_i . k_j  (j < i)      P_ij = scale G_ij q_i . k_j  (j <= i)
    G_ij = e^(c_i - c_j)                T    = (I + X diag(beta))^-1

With a gate for each channel G is inside the products, and exp(-c_j) could overflow. Sub-blocks of
16 tokens avoid it: the decay from an earlier sub-block is that to the token before the own one,
times that from there on. Pairs within a sub-block are computed directly.
"""

import triton
import triton.language as tl

from ....triton.kernels.arithmetic import product
from ....triton.kernels.segments import has_no_work, segment_of
from .arguments import SUB_BLOCK, UNSPECIALIZED
from .decay import between, load_sums, own_decay, transposed
from .memory import (
    last_row,
    load_beta,
    load_square,
    load_unit,
    load_unit_slice,
    rows_of,
    square,
    store_square,
)

SUB = tl.constexpr(SUB_BLOCK)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def pairs_kernel(
    q, k, high, low, beta, X, P, T, cu_seqlens,
    rows, B, chunks, beta_b, beta_h, beta_l, scale, heads, sizes,
):  # fmt: skip
    """Rows of X and P, (chunks, H_v, CHUNK, CHUNK), of one sub-block and head; and in T the inverse
    of the sub-block alone"""
    blocks: tl.constexpr = sizes.CHUNK // SUB
    first = tl.program_id(0) % blocks * SUB
    h = tl.program_id(0) // blocks % heads.H_q
    number = tl.program_id(0) // (blocks * heads.H_q)
    at = segment_of(number, cu_seqlens, rows, B, sizes.CHUNK, chunks)
    if has_no_work(at):
        return
    n = at.base + at.index
    start = at.index * sizes.CHUNK
    chunk, own = rows_of(at, start, sizes.CHUNK), rows_of(at, start + first, SUB)
    c = load_sums(high, low, own, h, sizes)
    key, _ = load_unit(k, own, h // sizes.GROUP, sizes)
    query, _ = load_unit(q, own, h // sizes.GROUP, sizes)
    before = load_sums(high, low, last_row(at, start + tl.maximum(first, 1)), h, sizes)
    enter = between(c, before, own.inside[:, None])
    j = tl.arange(0, sizes.CHUNK)
    is_earlier = (j < first) & (start + first < at.tokens)
    earlier, _ = load_unit(k, chunk, h // sizes.GROUP, sizes)
    c_earlier = load_sums(high, low, chunk, h, sizes)
    earlier = tl.trans(earlier * between(before, c_earlier, is_earlier[:, None]))
    x, p = product(key * enter, earlier, sizes), product(query * enter, earlier, sizes)
    is_other = ((j < first) | (j >= first + SUB))[None, :]
    x_own, p_own = own_pairs(query, key, c, q, k, high, low, own, h, sizes)
    of_own = inverse(x_own * load_beta(beta, own, h, beta_b, beta_h, beta_l)[None, :])
    store_pairs(X, x, x_own, is_other, n, h, heads, first, sizes)
    store_pairs(P, scale * p, scale * p_own, is_other, n, h, heads, first, sizes)
    store_pairs(T, tl.zeros_like(x), of_own, is_other, n, h, heads, first, sizes)


@triton.jit
def own_pairs(query, key, c, q, k, high, low, own, h, sizes):
    """(X, P / scale) of a sub-block's pairs"""
    i, j = tl.arange(0, SUB)[:, None], tl.arange(0, SUB)[None, :]
    if sizes.GATES == 1:
        decay = between(c, transposed(c), (j <= i) & own.inside[:, None])
        x, p = product(key, tl.trans(key), sizes), product(query, tl.trans(key), sizes)
        x, p = x * decay, p * decay
    else:
        x, p = tl.zeros([SUB, SUB], tl.float32), tl.zeros([SUB, SUB], tl.float32)
        for column in range(0, sizes.D, sizes.CHANNELS):
            a = load_unit_slice(q, own, h // sizes.GROUP, column, sizes.CHANNELS, sizes)
            b = load_unit_slice(k, own, h // sizes.GROUP, column, sizes.CHANNELS, sizes)
            decayed = b[None, :, :] * own_decay(high, low, own, h, column, sizes.CHANNELS, sizes)
            x += tl.sum(b[:, None, :] * decayed, 2)
            p += tl.sum(a[:, None, :] * decayed, 2)
    return tl.where(j < i, x, 0.0), p


@triton.jit
def inverse(lower):
    """(I + lower)^-1 of a strictly lower triangle, row by row"""
    i, j = tl.arange(0, lower.shape[0])[:, None], tl.arange(0, lower.shape[0])[None, :]
    T = tl.where(i == j, 1.0, 0.0)
    for n in range(1, lower.shape[0]):
        row = tl.sum(tl.where(i == n, lower, 0.0), 0)
        T -= tl.where(i == n, tl.sum(row[:, None] * T, 0)[None, :], 0.0)
    return T


@triton.jit
def store_pairs(x, others, own, is_other, n, h, heads, first, sizes):
    """Stores the rows of a sub-block: its pairs with others, and its own ones"""
    at = square(x, n, h, heads, first, 0, SUB, sizes.CHUNK, sizes.CHUNK)
    tl.store(at, others, mask=is_other & (tl.arange(0, SUB) >= 0)[:, None])
    tl.store(square(x, n, h, heads, first, first, SUB, SUB, sizes.CHUNK), own)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def merge_kernel(
    beta, X, T, cu_seqlens,
    rows, B, chunks, beta_b, beta_h, beta_l, scale, heads, sizes,
):  # fmt: skip
    """Turns the inverses of two sub-blocks, T, into that of the chunk:

    T - T X diag(beta) T, with the pairs of different sub-blocks in X.
    """
    h, number = tl.program_id(0) % heads.H_q, tl.program_id(0) // heads.H_q
    at = segment_of(number, cu_seqlens, rows, B, sizes.CHUNK, chunks)
    if has_no_work(at):
        return
    n = at.base + at.index
    chunk = rows_of(at, at.index * sizes.CHUNK, sizes.CHUNK)
    block = tl.arange(0, sizes.CHUNK) // SUB
    x = load_square(X, n, h, heads, sizes.CHUNK)
    x *= load_beta(beta, chunk, h, beta_b, beta_h, beta_l)[None, :]
    x = tl.where(block[:, None] > block[None, :], x, 0.0)
    of_blocks = load_square(T, n, h, heads, sizes.CHUNK)
    x = product(product(of_blocks, x, sizes), of_blocks, sizes)
    store_square(T, n, h, heads, of_blocks - x, sizes.CHUNK)
