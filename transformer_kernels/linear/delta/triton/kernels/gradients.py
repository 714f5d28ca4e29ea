"""Gradients of q, k and beta.

    dX = -Z U^T  (j < i)        dP = scale dO U^T  (j <= i)        dbeta = sum of R * Y
    dQ = scale e (dO S_0^T) + (dP G) K
    dK = (dX G) K - e (Z S_0^T)                                            k as the row of a pair
       + (dP G)^T Q + (dX G)^T K + e^(c_C - c) (U dS_C^T)                  k as its column
    dc = q . dq + k . (dk of rows - dk of columns); after the last token <dS_C, S_C> too

The first kernel computes the terms with states, the second those with pairs, by sub-blocks as in
pairs.py. G is the decay of a pair.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .....backends.triton.kernels.primitives import vector_pointer
from ....triton.kernels.arithmetic import add_product, product
from ....triton.kernels.memory import load_slice, store_slice
from ....triton.kernels.segments import has_no_work, segment_of
from .arguments import UNSPECIALIZED
from .decay import between, load_sums, own_decay, transposed
from .memory import (
    last_row,
    load_beta,
    load_matrix,
    load_unit,
    load_unit_slice,
    load_values,
    rows_of,
    square,
    store_square,
)
from .pairs import SUB
from .scan import load_factors


class Terms(NamedTuple):
    """Gradients of rows of q and k (tokens, D) in one value head."""

    dq: Any
    dk_row: Any
    """k in the role of the row of a pair"""
    dk_column: Any


@triton.jit(do_not_specialize=UNSPECIALIZED)
def state_gradients_kernel(
    do, y, residuals, high, low, beta, states, gradients,
    dq, dk_row, dk_column, dX, dP, dbeta, at_end, cu_seqlens,
    rows, B, chunks, beta_b, beta_h, beta_l, scale, heads, sizes,
):  # fmt: skip
    """Sums over the columns of v, of one chunk and head: the terms with states of dq, dk_row and
    dk_column; dX and dP (chunks, H_v, CHUNK, CHUNK); dbeta; at_end (chunks, H_v, gates), the sums
    of dS_C * S_C. states and gradients are S and dS at the boundaries of chunks."""
    h, number = tl.program_id(0) % heads.H_q, tl.program_id(0) // heads.H_q
    at = segment_of(number, cu_seqlens, rows, B, sizes.CHUNK, chunks)
    if has_no_work(at):
        return
    n, start = at.base + at.index, at.index * sizes.CHUNK
    chunk = rows_of(at, start, sizes.CHUNK)
    b_rows = load_beta(beta, chunk, h, beta_b, beta_h, beta_l)
    of_query = tl.zeros([sizes.CHUNK, sizes.BLOCK_D], tl.float32)
    of_row, of_column = tl.zeros_like(of_query), tl.zeros_like(of_query)
    x = tl.zeros([sizes.CHUNK, sizes.CHUNK], tl.float32)
    p = tl.zeros_like(x)
    of_beta, of_end = tl.zeros([sizes.CHUNK], tl.float32), tl.zeros([sizes.BLOCK_D], tl.float32)
    for column in range(0, sizes.D_V, sizes.SLICE):
        y_tile = load_values(y, chunk, h, column, sizes)
        r_tile = load_values(residuals, chunk, h, column, sizes)
        do_tile = load_values(do, chunk, h, column, sizes)
        of_beta += tl.sum(r_tile * y_tile, 1)
        u, z = r_tile * b_rows[:, None], y_tile * b_rows[:, None]
        x = add_product(x, -z, tl.trans(u), sizes)
        p = add_product(p, do_tile, tl.trans(u), sizes)
        dS = load_matrix(gradients, n + 1, h, heads, column, sizes)
        of_end += tl.sum(dS * load_matrix(states, n + 1, h, heads, column, sizes), 1)
        of_column = add_product(of_column, u, tl.trans(dS), sizes)
        S = tl.trans(load_matrix(states, n, h, heads, column, sizes))
        of_query = add_product(of_query, do_tile, S, sizes)
        of_row = add_product(of_row, -z, S, sizes)
    decay = load_factors(high, low, at, chunk, start, h, sizes)
    store_slice(dq, chunk, h, 0, of_query * decay.enter * scale, sizes.D)
    store_slice(dk_row, chunk, h, 0, of_row * decay.enter, sizes.D)
    store_slice(dk_column, chunk, h, 0, of_column * decay.leave, sizes.D)
    i, j = tl.arange(0, sizes.CHUNK)[:, None], tl.arange(0, sizes.CHUNK)[None, :]
    store_square(dX, n, h, heads, tl.where(j < i, x, 0.0), sizes.CHUNK)
    store_square(dP, n, h, heads, tl.where(j <= i, p * scale, 0.0), sizes.CHUNK)
    dbeta = vector_pointer(dbeta, heads, rows, chunk.b, h, chunk.row)
    tl.store(dbeta + tl.arange(0, sizes.CHUNK), of_beta, mask=chunk.inside)
    store_gates(at_end, n, h, heads, of_end, sizes)


@triton.jit
def store_gates(x, n, h, heads, tile, sizes):
    """Stores numbers for each channel, or their sum if there is one gate, in x (chunks, H_v,
    gates)"""
    at = x + (tl.cast(n, tl.int64) * heads.H_q + h) * sizes.GATES
    if sizes.GATES == 1:
        tl.store(at, tl.sum(tile, 0))
    else:
        gates = tl.arange(0, sizes.BLOCK_D)
        tl.store(at + gates, tile, mask=gates < sizes.D)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def pair_gradients_kernel(
    q, k, high, low, dq_state, dk_row, dk_column, dX, dP, dq, dk, dc, cu_seqlens,
    rows, B, chunks, beta_b, beta_h, beta_l, scale, heads, sizes,
):  # fmt: skip
    """dq and dk of one sub-block and head of k, summed over its value heads; and their dc, (B, H_v,
    rows, gates)"""
    blocks: tl.constexpr = sizes.CHUNK // SUB
    H_k = heads.H_q // sizes.GROUP
    first = tl.program_id(0) % blocks * SUB
    h_k = tl.program_id(0) // blocks % H_k
    number = tl.program_id(0) // (blocks * H_k)
    at = segment_of(number, cu_seqlens, rows, B, sizes.CHUNK, chunks)
    if has_no_work(at):
        return
    n = at.base + at.index
    start = at.index * sizes.CHUNK
    own = rows_of(at, start + first, SUB)
    query, inverse_q = load_unit(q, own, h_k, sizes)
    key, inverse_k = load_unit(k, own, h_k, sizes)
    total_q, total_k = tl.zeros_like(query), tl.zeros_like(key)
    for h in range(h_k * sizes.GROUP, (h_k + 1) * sizes.GROUP):
        of_query = load_slice(dq_state, own, h, own.inside, 0, sizes.D, sizes.BLOCK_D)
        of_row = load_slice(dk_row, own, h, own.inside, 0, sizes.D, sizes.BLOCK_D)
        of_column = load_slice(dk_column, own, h, own.inside, 0, sizes.D, sizes.BLOCK_D)
        terms = Terms(of_query, of_row, of_column)
        terms = add_other_pairs(
            terms, q, k, high, low, dX, dP, at, start, first, n, h, heads, sizes
        )
        terms = add_own_pairs(terms, query, key, high, low, dX, dP, own, first, n, h, heads, sizes)
        change = query * terms.dq + key * (terms.dk_row - terms.dk_column)
        if sizes.GATES == 1:
            change = tl.sum(change, 1)[:, None]
        store_slice(dc, own, h, 0, change, sizes.GATES)
        total_q += terms.dq
        total_k += terms.dk_row + terms.dk_column
    store_slice(dq, own, h_k, 0, unit_gradient(total_q, query, inverse_q, sizes), sizes.D)
    store_slice(dk, own, h_k, 0, unit_gradient(total_k, key, inverse_k, sizes), sizes.D)


@triton.jit
def add_other_pairs(terms, q, k, high, low, dX, dP, at, start, first, n, h, heads, sizes):
    """Adds the pairs of a sub-block's tokens with those of earlier and of later sub-blocks"""
    if sizes.CHUNK == SUB:
        return terms
    else:
        chunk, own = rows_of(at, start, sizes.CHUNK), rows_of(at, start + first, SUB)
        token = tl.arange(0, sizes.CHUNK)
        c_own = load_sums(high, low, own, h, sizes)
        c = load_sums(high, low, chunk, h, sizes)
        before = load_sums(high, low, last_row(at, start + tl.maximum(first, 1)), h, sizes)
        enter = between(c_own, before, own.inside[:, None])
        is_earlier = (token < first) & (start + first < at.tokens)
        keys, _ = load_unit(k, chunk, h // sizes.GROUP, sizes)
        earlier = keys * between(before, c, is_earlier[:, None])
        x = tl.load(square(dX, n, h, heads, first, 0, SUB, sizes.CHUNK, sizes.CHUNK))
        p = tl.load(square(dP, n, h, heads, first, 0, SUB, sizes.CHUNK, sizes.CHUNK))
        dq = terms.dq + enter * product(p, earlier, sizes)
        dk_row = terms.dk_row + enter * product(x, earlier, sizes)
        last = load_sums(high, low, last_row(at, start + first + SUB), h, sizes)
        leave = between(last, c_own, own.inside[:, None])
        is_later = (token >= first + SUB) & chunk.inside
        decay = between(c, last, is_later[:, None])
        queries, _ = load_unit(q, chunk, h // sizes.GROUP, sizes)
        x = tl.load(square(dX, n, h, heads, 0, first, sizes.CHUNK, SUB, sizes.CHUNK))
        p = tl.load(square(dP, n, h, heads, 0, first, sizes.CHUNK, SUB, sizes.CHUNK))
        of_column = product(tl.trans(p), queries * decay, sizes)
        of_column = add_product(of_column, tl.trans(x), keys * decay, sizes)
        return Terms(dq, dk_row, terms.dk_column + leave * of_column)


@triton.jit
def add_own_pairs(terms, query, key, high, low, dX, dP, own, first, n, h, heads, sizes):
    """Adds the pairs within a sub-block; with a gate for each channel, `own_pairs_kernel` did"""
    if sizes.GATES > 1:
        return terms
    else:
        c = load_sums(high, low, own, h, sizes)
        i, j = tl.arange(0, SUB)[:, None], tl.arange(0, SUB)[None, :]
        decay = between(c, transposed(c), (j <= i) & own.inside[:, None])
        x = tl.load(square(dX, n, h, heads, first, first, SUB, SUB, sizes.CHUNK)) * decay
        p = tl.load(square(dP, n, h, heads, first, first, SUB, SUB, sizes.CHUNK)) * decay
        dk_column = add_product(terms.dk_column, tl.trans(p), query, sizes)
        return Terms(
            add_product(terms.dq, p, key, sizes),
            add_product(terms.dk_row, x, key, sizes),
            add_product(dk_column, tl.trans(x), key, sizes),
        )


@triton.jit(do_not_specialize=UNSPECIALIZED)
def own_pairs_kernel(
    q, k, high, low, dq, dk_row, dk_column, dX, dP, cu_seqlens,
    rows, B, chunks, beta_b, beta_h, beta_l, scale, heads, sizes,
):  # fmt: skip
    """Adds the pairs within a sub-block to dq, dk_row and dk_column, in place, for CHANNELS
    channels of one head with a gate for each"""
    slices: tl.constexpr = (sizes.D + sizes.CHANNELS - 1) // sizes.CHANNELS
    blocks: tl.constexpr = sizes.CHUNK // SUB
    column = tl.program_id(0) % slices * sizes.CHANNELS
    first = tl.program_id(0) // slices % blocks * SUB
    h = tl.program_id(0) // (slices * blocks) % heads.H_q
    number = tl.program_id(0) // (slices * blocks * heads.H_q)
    at = segment_of(number, cu_seqlens, rows, B, sizes.CHUNK, chunks)
    if has_no_work(at):
        return
    n = at.base + at.index
    own = rows_of(at, at.index * sizes.CHUNK + first, SUB)
    key = load_unit_slice(k, own, h // sizes.GROUP, column, sizes.CHANNELS, sizes)
    query = load_unit_slice(q, own, h // sizes.GROUP, column, sizes.CHANNELS, sizes)
    decay = own_decay(high, low, own, h, column, sizes.CHANNELS, sizes)
    x = tl.load(square(dX, n, h, heads, first, first, SUB, SUB, sizes.CHUNK))[:, :, None]
    p = tl.load(square(dP, n, h, heads, first, first, SUB, SUB, sizes.CHUNK))[:, :, None]
    earlier = key[None, :, :] * decay
    add_to(dq, own, h, column, tl.sum(p * earlier, 1), sizes)
    add_to(dk_row, own, h, column, tl.sum(x * earlier, 1), sizes)
    later = (p * query[:, None, :] + x * key[:, None, :]) * decay
    add_to(dk_column, own, h, column, tl.sum(later, 0), sizes)


@triton.jit
def add_to(x, own, h, column, tile, sizes):
    before = load_slice(x, own, h, own.inside, column, sizes.D, sizes.CHANNELS)
    store_slice(x, own, h, column, before + tile, sizes.D)


@triton.jit
def unit_gradient(dy, y, inverse, sizes):
    """Gradient of the rows x of y = x / length, from that of y"""
    if sizes.L2NORM:
        return (dy - y * tl.sum(y * dy, 1)[:, None]) * inverse[:, None]
    else:
        return dy
