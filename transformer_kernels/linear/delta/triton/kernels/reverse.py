"""Scan from the last chunk of a sequence to the first one: dv and the gradients of the states.

    dU = P^T dO + (e^(c_C - c) K) dS
    Z  = T^T (beta dU)        dV = Z        Y = dU - X^T Z        Z = beta Y
    dS = e_C dS + scale (e Q)^T dO - (e K)^T Z

Y = dU - X^T Z is the gradient of U less what later tokens take; dbeta sums its products with R.
"""

import triton
import triton.language as tl

from ....triton.kernels.arithmetic import add_product, product
from ....triton.kernels.memory import store_slice
from ....triton.kernels.segments import first_segment, program_slice
from .arguments import UNSPECIALIZED
from .memory import (
    load_beta,
    load_matrix,
    load_square,
    load_unit,
    load_values,
    rows_of,
    store_matrix,
)
from .scan import load_factors


@triton.jit(do_not_specialize=UNSPECIALIZED)
def reverse_kernel(
    q, k, do, dv, y, high, low, beta, X, P, T, start, end, states, cu_seqlens,
    rows, B, chunks, beta_b, beta_h, beta_l, scale, heads, sizes,
):  # fmt: skip
    """SLICE columns of one sequence and head. start is dS after the last token, None if 0; end, if
    not None, receives that before the first one, states receives all at the boundaries of
    chunks."""
    b, h, column = program_slice(heads.H_q, sizes.D_V, sizes)
    at = first_segment(b, cu_seqlens, rows, sizes.CHUNK, chunks)
    dS = tl.zeros([sizes.BLOCK_D, sizes.SLICE], tl.float32)
    if start is not None:
        dS = load_matrix(start, b, h, heads, column, sizes)
    for step in range(at.count):
        index = at.count - 1 - step
        n, first = at.base + index, index * sizes.CHUNK
        store_matrix(states, n + 1, h, heads, column, dS, sizes)
        chunk = rows_of(at, first, sizes.CHUNK)
        decay = load_factors(high, low, at, chunk, first, h, sizes)
        key, _ = load_unit(k, chunk, h // sizes.GROUP, sizes)
        query, _ = load_unit(q, chunk, h // sizes.GROUP, sizes)
        b_rows = load_beta(beta, chunk, h, beta_b, beta_h, beta_l)[:, None]
        do_tile = load_values(do, chunk, h, column, sizes)
        du = product(key * decay.leave, dS, sizes)
        du = add_product(du, tl.trans(load_square(P, n, h, heads, sizes.CHUNK)), do_tile, sizes)
        T_tile = load_square(T, n, h, heads, sizes.CHUNK)
        z = product(tl.trans(T_tile), b_rows * du, sizes)
        X_tile = load_square(X, n, h, heads, sizes.CHUNK)
        store_slice(dv, chunk, h, column, z, sizes.D_V)
        store_slice(y, chunk, h, column, du - product(tl.trans(X_tile), z, sizes), sizes.D_V)
        dS = add_product(dS * decay.kept, tl.trans(query * decay.enter * scale), do_tile, sizes)
        dS = add_product(dS, tl.trans(key * decay.enter), -z, sizes)
    store_matrix(states, at.base, h, heads, column, dS, sizes)
    if end is not None:
        store_matrix(end, b, h, heads, column, dS, sizes)
