"""The backward pass of one tile: from products to the gradients of scores, in either orientation.

    p  = exp(s - lse), 0 where hidden
    dp = z (do v)
    ds = p (dp - delta),  delta = rowsum(do o) - dlse
    da = ds (1 - tanh^2), with a softcap

docs/attention.md, section 3.
"""

import triton
import triton.language as tl

from transformer_kernels.backends.triton.kernels.dropout import kept
from transformer_kernels.backends.triton.kernels.primitives import (
    exponents,
    load_rows,
    matrix,
    power,
    scaled,
    sequence,
    unit,
    vector,
)


@triton.jit
def load_statistics(base_rows, delta_rows, i, M, CHECKED: tl.constexpr):
    """(lse in the unit of `exponents`, delta) of rows i. A row that sees nothing, or is not there,
    has an lse of +inf, so that its weights are 0."""
    if CHECKED:
        base = tl.load(base_rows + i, mask=i < M, other=float("inf"))
        return base, tl.load(delta_rows + i, mask=i < M, other=0.0)
    else:
        return tl.load(base_rows + i), tl.load(delta_rows + i)


@triton.jit
def weights(products, base, bias, shown, mask, scores, offset, h, i, j, EXACT: tl.constexpr):
    """p of a tile, 0 where not `shown` (None: all is)"""
    if shown is not None:
        # Not the weights: AMD's compiler cannot turn a tile of flags into an operand's layout.
        base = tl.where(shown, base, float("inf"))
    p = power(exponents(products, bias, scores, offset, h, i, j, EXACT) - base, EXACT)
    if shown is not None and mask.q_segments is not None:
        # A key of a segment that no query is of may be NaN.
        p = tl.where(base != float("inf"), p, 0.0)
    return p


@triton.jit
def dropout_factor(
    dropout, b, h, i0, j0, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """z of a tile; 1 without dropout"""
    if dropout.seed is None:
        return 1.0
    else:
        keep = kept(dropout, b, h, i0, j0, BLOCK_M, BLOCK_N)
        if TRANSPOSED:
            keep = tl.trans(keep)
        return tl.where(keep, dropout.factor, 0.0)


@triton.jit
def score_gradients(p, dp, delta, shown, mask):
    """ds of a tile"""
    ds = p * (dp - delta)
    if shown is not None and mask.q_segments is not None:
        ds = tl.where(p != 0.0, ds, 0.0)  # a value of such a segment may be NaN
    return ds


@triton.jit
def product_gradients(ds, products, scores):
    """da of a tile"""
    if scores.softcap is None:
        return ds
    else:
        t = scaled(products, scores) / scores.softcap
        return ds * (1.0 - t * t)


@triton.jit(do_not_specialize=["rows", "M", "N"])
def bwd_preprocess_kernel(
    o,
    do,
    lse,
    dlse,
    base,
    delta,
    rows,
    M,
    N,
    heads,
    sequences,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    EXACT: tl.constexpr,
):
    """What each row brings into every tile: `base`, see `load_statistics`, and delta less dlse"""
    blocks = tl.cdiv(M, BLOCK_M)
    program = tl.program_id(0)
    h = program // blocks % heads.H_q
    b = program // blocks // heads.H_q
    at_b, first_q, _, M, _ = sequence(sequences, b, M, N)
    i0 = program % blocks * BLOCK_M
    i = i0 + tl.arange(0, BLOCK_M)
    o_head, do_head = matrix(o, at_b, h, first_q), matrix(do, at_b, h, first_q)
    o_tile = load_rows(o_head, o.stride_l, i0, i < M, BLOCK_M, D_V, BLOCK_DV, True)
    do_tile = load_rows(do_head, do.stride_l, i0, i < M, BLOCK_M, D_V, BLOCK_DV, True)
    total = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if dlse is not None:
        total -= tl.load(vector(dlse, heads, rows, at_b, h, first_q) + i, mask=i < M, other=0.0)
    tl.store(vector(delta, heads, rows, at_b, h, first_q) + i, total, mask=i < M)
    lse_i = tl.load(vector(lse, heads, rows, at_b, h, first_q) + i, mask=i < M, other=0.0)
    lse_i = tl.where(lse_i == float("-inf"), float("inf"), lse_i)
    tl.store(vector(base, heads, rows, at_b, h, first_q) + i, unit(lse_i, EXACT), mask=i < M)
