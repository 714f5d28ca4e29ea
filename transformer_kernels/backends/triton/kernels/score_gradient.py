"""Backward pass of one tile, from products to score gradients, in either orientation.

    p  = exp(s - lse), 0 where hidden
    dp = z (do v)
    ds = p (dp - delta),  delta = rowsum(do o) - dlse
    da = ds (1 - tanh^2), with a softcap

docs/attention.md, section 3.
"""

import triton
import triton.language as tl

from transformer_kernels.backends.triton.kernels.dropout import keep_mask
from transformer_kernels.backends.triton.kernels.primitives import (
    LOG2E,
    head_pointer,
    load_rows,
    natural_scores,
    scaled,
    sequence,
    vector_pointer,
)


@triton.jit
def load_statistics(base_rows, delta_rows, i, M, CHECKED: tl.constexpr):
    """(lse, delta) of rows i. Fully masked and out-of-bounds rows have lse = +inf, so that their
    weights are 0."""
    if CHECKED:
        base = tl.load(base_rows + i, mask=i < M, other=float("inf"))
        return base, tl.load(delta_rows + i, mask=i < M, other=0.0)
    else:
        return tl.load(base_rows + i), tl.load(delta_rows + i)


@triton.jit
def weights(products, base, bias, is_visible, mask, scores, offset, h, i, j):
    """p of a tile, 0 where not `is_visible` (None: everything is visible). The scaled score is
    rounded before lse (`base`) is subtracted, as in the forward pass: docs/attention.md, section 8.
    """
    if is_visible is not None:
        # Masks lse, not p: AMD's compiler cannot convert a bool tile to the layout of an operand.
        base = tl.where(is_visible, base, float("inf"))
    p = tl.exp2((natural_scores(products, bias, scores, offset, h, i, j) - base) * LOG2E)
    if is_visible is not None and (
        mask.q_segments is not None or mask.dense is not None or mask.layout is not None
    ):
        p = tl.where(base != float("inf"), p, 0.0)  # a key that no query sees may be NaN
    return p


@triton.jit
def dropout_factor(
    dropout, b, h, i0, j0, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """z of a tile: the factor of kept weights, or 0; 1 without dropout"""
    if dropout.seed is None:
        return 1.0
    else:
        keep = keep_mask(dropout, b, h, i0, j0, BLOCK_M, BLOCK_N)
        if TRANSPOSED:
            keep = tl.trans(keep)
        return tl.where(keep, dropout.factor, 0.0)


@triton.jit
def score_gradients(p, dp, delta, is_visible, mask):
    """ds of a tile"""
    ds = p * (dp - delta)
    if is_visible is not None and (
        mask.q_segments is not None or mask.dense is not None or mask.layout is not None
    ):
        ds = tl.where(p != 0.0, ds, 0.0)  # a value that no query sees may be NaN
    return ds


@triton.jit
def product_gradients(ds, products, scores):
    """da of a tile"""
    if scores.softcap is None:
        return ds
    else:
        t = scaled(products, scores) / scores.softcap
        return tl.where(ds != 0.0, ds * (1.0 - t * t), 0.0)  # products may be NaN where hidden


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
):
    """Backward preprocess: base (see `load_statistics`) and delta = rowsum(do o) - dlse of a row"""
    blocks = tl.cdiv(M, BLOCK_M)
    program = tl.program_id(0)
    h = program // blocks % heads.H_q
    b = program // blocks // heads.H_q
    memory_b, first_q, _, M, _ = sequence(sequences, b, M, N, rows, rows)
    i0 = program % blocks * BLOCK_M
    i = i0 + tl.arange(0, BLOCK_M)
    o_head, do_head = head_pointer(o, memory_b, h, first_q), head_pointer(do, memory_b, h, first_q)
    o_tile = load_rows(o_head, o.stride_l, i0, i < M, BLOCK_M, D_V, BLOCK_DV, True)
    do_tile = load_rows(do_head, do.stride_l, i0, i < M, BLOCK_M, D_V, BLOCK_DV, True)
    total = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if dlse is not None:
        total -= tl.load(
            vector_pointer(dlse, heads, rows, memory_b, h, first_q) + i, mask=i < M, other=0.0
        )
    tl.store(vector_pointer(delta, heads, rows, memory_b, h, first_q) + i, total, mask=i < M)
    lse_i = tl.load(
        vector_pointer(lse, heads, rows, memory_b, h, first_q) + i, mask=i < M, other=0.0
    )
    lse_i = tl.where(lse_i == float("-inf"), float("inf"), lse_i)
    tl.store(vector_pointer(base, heads, rows, memory_b, h, first_q) + i, lse_i, mask=i < M)
