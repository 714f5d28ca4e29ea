"""Scan over the chunks of a segment: o, dq, dk or dv of one head.

    W_ij  = a_i . b_j + alpha_i beta_j              j <= i, or j >= i if REVERSE
    out_i = sum_j decay(i, j) W_ij c_j + enter_i (a_i T + alpha_i u)
    T     = kept T + sum_j leave_j b_j c_j^T,  u = kept u + sum_j leave_j beta_j c_j

          a       b           c           alpha   beta    T     u   REVERSE  TRANSPOSED
    o     phi(q)  phi(k)      v                           S         False    False
    dq    do      v           phi(k)      -delta  1       S^T   z   False    True
    dk    v       do          phi(q) / l  1       -delta  dS^T  dz  True     True
    dv    phi(k)  phi(q) / l  do                          dS        True     False

The scan for o keeps all of z in place of u: its denominator l is the sum of the decayed W and
enter (a . z) + eps. Without normalization l is 1 and delta 0. If not CAUSAL, T and u are those of
all tokens, and there are no W. docs/linear.md, sections 2, 3 and 6.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....backends.triton.kernels.primitives import vector_pointer
from .arguments import UNSPECIALIZED
from .arithmetic import add_product, features, product, times_slope
from .decay import decay_pointer, decayed_pairs, load_decay
from .memory import load_features, load_operand, load_slice, load_state, store_slice, store_state
from .segments import (
    chunk_of,
    chunks_of,
    has_no_work,
    is_at_end,
    program_slice,
    segment_of,
    start_boundary,
)
from .statistics import load_statistics


class Running(NamedTuple):
    """Sums of a scan: out and the denominator of the chunk, and the state."""

    out: Any
    denominator: Any
    T: Any
    u: Any


@triton.jit(do_not_specialize=UNSPECIALIZED)
def scan_kernel(
    a, b, c, x, out, normalizer, products, statistics, log_decay, keys, start, end, cu_seqlens,
    rows, B, segment, segments, decay_b, decay_h, decay_l, eps,
    heads, sizes, REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr, BY_BOUNDARY: tl.constexpr,
):  # fmt: skip
    """One segment of one head, SLICE columns of c and out.

    x is q (dq) or k (dk), whose features and slope finish the gradient. normalizer receives l.
    products (slices, B, heads, rows), if not None, receives phi(x) . dphi(x). start holds the
    states at boundaries if BY_BOUNDARY, else of sequences. end receives the final state.
    """
    COLUMNS: tl.constexpr = sizes.D if TRANSPOSED else sizes.D_V
    own_heads = heads.H_q // heads.group if REVERSE else heads.H_q
    number, h, column = program_slice(own_heads, COLUMNS, sizes)
    at = segment_of(number, cu_seqlens, rows, B, segment, segments)
    if has_no_work(at):
        return
    h_kv = h if REVERSE else h // heads.group
    if sizes.DECAYED:
        log_decay = decay_pointer(log_decay, at, h_kv, decay_b, decay_h, decay_l)
    if normalizer is not None:
        normalizer = vector_pointer(normalizer, heads, rows, at.memory_b, h, at.first)
    if products is not None:
        batches = B if cu_seqlens is None else 1
        entry = (column // sizes.SLICE * batches + at.memory_b) * own_heads + h
        products += tl.cast(entry, tl.int64) * rows + at.first
    place = start_boundary(at, REVERSE) if BY_BOUNDARY else at.b
    T, u = load_state(start, place, h_kv, heads, column, sizes, TRANSPOSED)
    chunks = chunks_of(at, segment, sizes.CHUNK)
    for step in range(chunks):
        n = chunks - 1 - step if REVERSE else step
        chunk = chunk_of(at, n, segment, keys, sizes.CHUNK)
        decay = load_decay(log_decay, chunk, decay_l, sizes, REVERSE)
        live = chunk.visible if REVERSE else chunk.inside  # rows of out: keys or queries
        running = scan_chunk(
            T, u, a, b, c, chunk, h, live, column, statistics, decay, rows, heads, sizes,
            REVERSE, TRANSPOSED,
        )  # fmt: skip
        T, u = running.T, running.u
        if TRANSPOSED:
            y = input_gradient(running.out, x, products, chunk, h, live, column, sizes)
        elif REVERSE:
            y = tl.where(live[:, None], running.out, 0.0)
        else:
            y = normalized(running, normalizer, chunk, column, eps, sizes)
        store_slice(out, chunk, h, column, y, COLUMNS)
    if is_at_end(at, REVERSE) and (REVERSE or h % heads.group == 0):
        store_state(end, at.b, h_kv, heads, column, T, u, sizes, TRANSPOSED)


@triton.jit
def scan_chunk(
    T, u, a, b, c, chunk, h, live, column, statistics, decay, rows, heads, sizes,
    REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """`Running` after a chunk; out is divided by l for dq"""
    a_tile = load_operand(a, chunk, h, live, sizes, TRANSPOSED)
    inverse, delta = 1.0, 0.0
    if TRANSPOSED and not REVERSE and sizes.NORMALIZE:
        inverse, delta = load_statistics(statistics, heads, rows, chunk, h)
        inverse = inverse[:, None]
    running = enter_state(T, u, a_tile, delta, decay, sizes, REVERSE, TRANSPOSED)
    if sizes.CAUSAL and REVERSE:
        for g in range(h * heads.group, (h + 1) * heads.group):
            running = add_pairs(
                running, a_tile, delta, b, c, chunk, g, chunk.inside, column, statistics,
                decay, rows, heads, sizes, REVERSE, TRANSPOSED,
            )  # fmt: skip
    elif sizes.CAUSAL:
        running = add_pairs(
            running, a_tile, delta, b, c, chunk, h // heads.group, chunk.visible, column,
            statistics, decay, rows, heads, sizes, REVERSE, TRANSPOSED,
        )  # fmt: skip
    return Running(running.out * inverse, running.denominator, running.T, running.u)


@triton.jit
def enter_state(T, u, a_tile, delta, decay, sizes, REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr):
    """`Running` with the part of the state in out and in the denominator, and the decayed state"""
    out = product(a_tile, T, sizes)
    denominator = tl.zeros([sizes.CHUNK], tl.float32)
    if TRANSPOSED:
        if REVERSE:
            out += u[None, :]
        elif sizes.NORMALIZE:
            out -= delta[:, None] * u[None, :]
    elif not REVERSE:
        denominator = tl.sum(a_tile * u[None, :], 1)
    if sizes.DECAYED:
        out *= decay.enter[:, None]
        denominator *= decay.enter
        T *= decay.kept
        u *= decay.kept
    return Running(out, denominator, T, u)


@triton.jit
def add_pairs(
    running, a_tile, delta, b, c, chunk, h, live, column, statistics,
    decay, rows, heads, sizes, REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Adds the pairs of a chunk, with b and c of head h, to out and the denominator, and b and c to
    the state. `delta` is that of the rows (dq); that of the columns (dk, dv) is loaded."""
    out, denominator, T, u = running.out, running.denominator, running.T, running.u
    b_tile = load_operand(b, chunk, h, live, sizes, TRANSPOSED)
    if TRANSPOSED:
        c_tile = load_features(c, chunk, h, live, column, sizes.SLICE, sizes)
    else:
        c_tile = load_slice(c, chunk, h, live, column, sizes.D_V, sizes.SLICE)
    if REVERSE and sizes.NORMALIZE:
        inverse, delta = load_statistics(statistics, heads, rows, chunk, h)
        if TRANSPOSED:
            c_tile *= inverse[:, None]
        else:
            b_tile *= inverse[:, None]
    w = product(a_tile, tl.trans(b_tile), sizes)
    if TRANSPOSED and sizes.NORMALIZE:
        w -= delta[None, :] if REVERSE else delta[:, None]
    w = decayed_pairs(w, decay, sizes, REVERSE)
    out = add_product(out, w, c_tile, sizes)
    if TRANSPOSED:
        if sizes.DECAYED:
            c_tile *= decay.leave[:, None]
        if sizes.NORMALIZE:
            u += tl.sum(-delta[:, None] * c_tile if REVERSE else c_tile, 0)
    else:
        if sizes.DECAYED:
            b_tile *= decay.leave[:, None]
        if not REVERSE:
            denominator += tl.sum(w, 1)
            u += tl.sum(b_tile, 0)
    T = add_product(T, tl.trans(b_tile), c_tile, sizes)
    return Running(out, denominator, T, u)


@triton.jit
def normalized(running, normalizer, chunk, column, eps, sizes):
    """out / l; the first slice stores l. out if not NORMALIZE"""
    if not sizes.NORMALIZE:
        return running.out
    else:
        denominator = running.denominator + eps
        if column == 0:
            tl.store(normalizer + chunk.i, denominator, mask=chunk.inside)
        return running.out / denominator[:, None]


@triton.jit
def input_gradient(y, x, products, chunk, h, live, column, sizes):
    """Gradient of q or k from that of its features, y; stores the products phi(x) . y of the
    rows"""
    tile = load_slice(x, chunk, h, live, column, sizes.D, sizes.SLICE)
    y = tl.where(live[:, None], y, 0.0)
    if products is not None:
        tl.store(products + chunk.i, tl.sum(features(tile, sizes) * y, 1), mask=chunk.inside)
    return times_slope(y, tile, sizes)
