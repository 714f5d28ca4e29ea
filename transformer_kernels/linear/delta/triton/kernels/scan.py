"""Scan over the chunks of a sequence: o and the states.

    R = T (V - (e K) S)        U = beta R
    O = scale (e Q) S + P U
    S = e_C S + (e^(c_C - c) K)^T U

e = exp(c) is the decay from the start of the chunk, e_C that of the whole chunk. X, P and T are
those of pairs.py.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....triton.kernels.arithmetic import add_product, product
from ....triton.kernels.memory import store_slice
from ....triton.kernels.segments import first_segment, program_slice
from .arguments import UNSPECIALIZED
from .decay import between, from_start, kept, load_sums
from .memory import (
    last_row,
    load_beta,
    load_matrix,
    load_square,
    load_unit,
    load_values,
    rows_of,
    store_matrix,
)


class Factors(NamedTuple):
    """Decay of a chunk."""

    enter: Any
    """from the start of the chunk to each token (CHUNK, gates)"""
    leave: Any
    """from each token to the end of the chunk (CHUNK, gates)"""
    kept: Any
    """of the rows of the state (gates, 1)"""


@triton.jit
def load_factors(high, low, at, chunk, start, h, sizes):
    c = load_sums(high, low, chunk, h, sizes)
    end = load_sums(high, low, last_row(at, start + sizes.CHUNK), h, sizes)
    return Factors(from_start(c), between(end, c, chunk.inside[:, None]), kept(end))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def scan_kernel(
    q, k, v, o, residuals, high, low, beta, P, T, start, end, states, cu_seqlens,
    rows, B, chunks, beta_b, beta_h, beta_l, scale, heads, sizes,
):  # fmt: skip
    """SLICE columns of one sequence and head. Of the results o, end (the final state), states (all
    at the boundaries of chunks) and residuals (R), those that are None are not computed."""
    b, h, column = program_slice(heads.H_q, sizes.D_V, sizes)
    at = first_segment(b, cu_seqlens, rows, sizes.CHUNK, chunks)
    S = tl.zeros([sizes.BLOCK_D, sizes.SLICE], tl.float32)
    if start is not None:
        S = load_matrix(start, b, h, heads, column, sizes)
    for index in range(at.count):
        n, first = at.base + index, index * sizes.CHUNK
        if states is not None:
            store_matrix(states, n, h, heads, column, S, sizes)
        chunk = rows_of(at, first, sizes.CHUNK)
        enter = from_start(load_sums(high, low, chunk, h, sizes))
        key, _ = load_unit(k, chunk, h // sizes.GROUP, sizes)
        w = load_values(v, chunk, h, column, sizes) - product(key * enter, S, sizes)
        r = product(load_square(T, n, h, heads, sizes.CHUNK), w, sizes)
        if residuals is not None:
            store_slice(residuals, chunk, h, column, r, sizes.D_V)
        u = r * load_beta(beta, chunk, h, beta_b, beta_h, beta_l)[:, None]
        if o is not None:
            query, _ = load_unit(q, chunk, h // sizes.GROUP, sizes)
            y = product(query * enter * scale, S, sizes)
            y = add_product(y, load_square(P, n, h, heads, sizes.CHUNK), u, sizes)
            store_slice(o, chunk, h, column, y, sizes.D_V)
        # loaded again: they would take registers until here
        decay = load_factors(high, low, at, chunk, first, h, sizes)
        key, _ = load_unit(k, chunk, h // sizes.GROUP, sizes)
        S = add_product(S * decay.kept, tl.trans(key * decay.leave), u, sizes)
    if states is not None:
        store_matrix(states, at.base + at.count, h, heads, column, S, sizes)
    if end is not None:
        store_matrix(end, b, h, heads, column, S, sizes)
