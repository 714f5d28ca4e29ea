"""Results: o, dq, dk or dv of one chunk of a head, from the state and the chunks of its segment.

    W_ij  = a_i . b_j + alpha_i beta_j              j <= i, or j >= i if REVERSE
    out_i = sum_j decay(i, j) W_ij c_j + enter_i (a_i T + alpha_i u)

          a       b           c           alpha   beta    T     u   REVERSE  TRANSPOSED
    o     phi(q)  phi(k)      v                           S         False    False
    dq    do      v           phi(k)      -delta  1       S^T   z   False    True
    dk    v       do          phi(q) / l  1       -delta  dS^T  dz  True     True
    dv    phi(k)  phi(q) / l  do                          dS        True     False

T and u are the state at the start of the segment, or at its end if REVERSE; the sum is over the
tokens from there on. The denominator l of o is the sum of the decayed W and enter (a . z) + eps.
Without normalization l is 1 and delta 0. If not CAUSAL, T and u are those of all tokens, and there
are no W. docs/linear.md, sections 2, 3 and 6.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....backends.triton.kernels.primitives import vector_pointer
from .arguments import UNSPECIALIZED
from .arithmetic import add_product, features, product, times_slope
from .decay import decay_pointer, decayed_pairs, load_decay
from .memory import load_features, load_operand, load_slice, load_state, store_slice
from .segments import chunk_of, chunks_of, has_no_work, program_slice, segment_of, start_boundary
from .statistics import load_statistics


class Running(NamedTuple):
    """Sums over the chunks that a program has visited."""

    out: Any
    denominator: Any


@triton.jit(do_not_specialize=UNSPECIALIZED)
def results_kernel(
    a, b, c, x, out, normalizer, products, statistics, log_decay, keys, start, cu_seqlens,
    rows, B, segment, segments, decay_b, decay_h, decay_l, eps,
    heads, sizes, REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr, BY_BOUNDARY: tl.constexpr,
):  # fmt: skip
    """One chunk of one head, SLICE columns of c and out.

    x is q (dq) or k (dk), whose features and slope finish the gradient. normalizer receives l.
    products (slices, B, heads, rows), if not None, receives phi(x) . dphi(x). start holds the
    states at boundaries if BY_BOUNDARY, else of sequences.
    """
    COLUMNS: tl.constexpr = sizes.D if TRANSPOSED else sizes.D_V
    own_heads = heads.H_q // heads.group if REVERSE else heads.H_q
    number, h, column = program_slice(own_heads, COLUMNS, sizes)
    of_segment = segment // sizes.CHUNK  # chunks
    at = segment_of(number // of_segment, cu_seqlens, rows, B, segment, segments)
    n = number % of_segment
    if has_no_work(at) | (n >= chunks_of(at, segment, sizes.CHUNK)):
        return
    h_kv = h if REVERSE else h // heads.group
    if sizes.DECAYED:
        log_decay = decay_pointer(log_decay, at, h_kv, decay_b, decay_h, decay_l)
    own = chunk_of(at, n, segment, keys, sizes.CHUNK)
    live = own.visible if REVERSE else own.inside  # rows of out: keys or queries
    a_tile = load_operand(a, own, h, live, sizes, TRANSPOSED)
    inverse, delta = 1.0, 0.0
    if TRANSPOSED and not REVERSE and sizes.NORMALIZE:
        inverse, delta = load_statistics(statistics, heads, rows, own, h)
        inverse = inverse[:, None]
    place = start_boundary(at, REVERSE) if BY_BOUNDARY else at.b
    T, u = load_state(start, place, h_kv, heads, column, sizes, TRANSPOSED)
    running = of_state(a_tile, T, u, delta, sizes, REVERSE, TRANSPOSED)
    if sizes.CAUSAL:
        running = add_chunks(
            running, a_tile, delta, b, c, at, n, own, h_kv, column, statistics, log_decay, keys,
            rows, segment, decay_l, heads, sizes, REVERSE, TRANSPOSED,
        )  # fmt: skip
    if TRANSPOSED:
        if products is not None:
            batches = B if cu_seqlens is None else 1
            entry = (column // sizes.SLICE * batches + at.memory_b) * own_heads + h
            products += tl.cast(entry, tl.int64) * rows + at.first
        y = input_gradient(running.out * inverse, x, products, own, h, live, column, sizes)
    elif REVERSE:
        y = tl.where(live[:, None], running.out, 0.0)
    else:
        y = normalized(running, normalizer, own, h, column, rows, eps, heads, sizes)
    store_slice(out, own, h, column, y, COLUMNS)


@triton.jit
def of_state(a_tile, T, u, delta, sizes, REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr):
    """`Running` of the state: a T + alpha u, and a . z"""
    out = product(a_tile, T, sizes)
    denominator = tl.zeros([sizes.CHUNK], tl.float32)
    if TRANSPOSED:
        if REVERSE:
            out += u[None, :]
        elif sizes.NORMALIZE:
            out -= delta[:, None] * u[None, :]
    elif not REVERSE:
        denominator = tl.sum(a_tile * u[None, :], 1)
    return Running(out, denominator)


@triton.jit
def add_chunks(
    running, a_tile, delta, b, c, at, n, own, h_kv, column, statistics, log_decay, keys,
    rows, segment, decay_l, heads, sizes, REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Adds the pairs of the rows of out, which are chunk n of the segment, with the chunks before
    it, or after it if REVERSE, and with their own"""
    group = heads.group if REVERSE else 1  # heads of b and c, in the inner loop
    last = chunks_of(at, segment, sizes.CHUNK) - 1
    visits = (last - n if REVERSE else n) * group
    for visit in range(visits):
        step = visit // group
        chunk = chunk_of(at, last - step if REVERSE else step, segment, keys, sizes.CHUNK)
        decay = load_decay(log_decay, chunk, decay_l, sizes, REVERSE)
        if sizes.DECAYED:
            kept = tl.where(visit % group == 0, decay.kept, 1.0)
            running = Running(running.out * kept, running.denominator * kept)
        running = add_pairs(
            running, a_tile, delta, b, c, chunk, h_kv * group + visit % group, column,
            statistics, decay, rows, heads, sizes, REVERSE, TRANSPOSED, False,
        )  # fmt: skip
    decay = load_decay(log_decay, own, decay_l, sizes, REVERSE)
    if sizes.DECAYED:
        enter = decay.enter
        running = Running(running.out * enter[:, None], running.denominator * enter)
    for g in range(h_kv * group, (h_kv + 1) * group):
        running = add_pairs(
            running, a_tile, delta, b, c, own, g, column,
            statistics, decay, rows, heads, sizes, REVERSE, TRANSPOSED, True,
        )  # fmt: skip
    return running


@triton.jit
def add_pairs(
    running, a_tile, delta, b, c, chunk, h, column, statistics, decay, rows, heads, sizes,
    REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr, IS_OWN: tl.constexpr,
):  # fmt: skip
    """Adds the pairs of the rows of out with a chunk, with b and c of head h. `delta` is that of
    the rows (dq); that of the columns (dk, dv) is loaded. Pairs of another chunk decay to its end;
    in the own chunk, they are those that REVERSE allows."""
    live = chunk.inside if REVERSE else chunk.visible
    b_tile = load_operand(b, chunk, h, live, sizes, TRANSPOSED)
    if TRANSPOSED:
        c_tile = load_features(c, chunk, h, live, column, sizes.SLICE, sizes)
    else:
        c_tile = load_slice(c, chunk, h, live, column, sizes.D_V, sizes.SLICE)
    w = product(a_tile, tl.trans(b_tile), sizes)
    if REVERSE and sizes.NORMALIZE:
        inverse, delta = load_statistics(statistics, heads, rows, chunk, h)
        if TRANSPOSED:
            w -= delta[None, :]
        w *= inverse[None, :]
    elif TRANSPOSED and sizes.NORMALIZE:
        w -= delta[:, None]
    if IS_OWN:
        w = decayed_pairs(w, decay, sizes, REVERSE)
    elif sizes.DECAYED:
        w *= decay.leave[None, :]
    denominator = running.denominator
    if not (REVERSE or TRANSPOSED):
        denominator += tl.sum(w, 1)
    return Running(add_product(running.out, w, c_tile, sizes), denominator)


@triton.jit
def normalized(running, normalizer, chunk, h, column, rows, eps, heads, sizes):
    """out / l; the first slice stores l. out if not NORMALIZE"""
    if not sizes.NORMALIZE:
        return running.out
    else:
        denominator = running.denominator + eps
        if column == 0:
            to = vector_pointer(normalizer, heads, rows, chunk.b, h, chunk.row)
            tl.store(to + tl.arange(0, sizes.CHUNK), denominator, mask=chunk.inside)
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
