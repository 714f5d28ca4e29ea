"""Decay: sums of log-decays within a chunk, their exponentials, and the gradient of log_decay;
docs/linear.md, section 3."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arguments import UNSPECIALIZED
from .segments import chunk_of, has_no_work, segment_of

SMALLEST = tl.constexpr(-200.0)
"""SMALLEST_LOG_DECAY of linear/reference.py for float32"""
LOG2_E = tl.constexpr(1.4426950408889634)


class Decay(NamedTuple):
    """Decay of one chunk.

    G is the running sum of the log-decays in units of log(2), formed in float64 and kept as two
    float32 numbers, high + low: rounded to one, small differences of large sums would lose their
    bits.
    """

    high: Any
    low: Any
    enter: Any
    """factor of the state in each row of the result (CHUNK)"""
    leave: Any
    """factor of each row in the state (CHUNK)"""
    kept: Any
    """factor of the state"""
    total: Any
    """G of the last token, float64"""


@triton.jit
def decay_pointer(log_decay, at, h, decay_b, decay_h, decay_l):
    """Pointer to the log-decay of a sequence's first token in key head h"""
    return (
        log_decay
        + tl.cast(at.memory_b, tl.int64) * decay_b
        + tl.cast(h, tl.int64) * decay_h
        + tl.cast(at.first, tl.int64) * decay_l
    )


@triton.jit
def load_decay(log_decay, chunk, decay_l, sizes, REVERSE: tl.constexpr):
    """`Decay` of a chunk: hidden keys do not decay. Numbers without meaning if not DECAYED."""
    if not sizes.DECAYED:
        return Decay(0.0, 0.0, 1.0, 1.0, 1.0, 0.0)
    else:
        at = log_decay + tl.cast(chunk.i, tl.int64) * decay_l
        g = tl.load(at, mask=chunk.visible, other=0.0)
        g = tl.where(g < SMALLEST, SMALLEST, g).to(tl.float64) * LOG2_E
        total = tl.sum(g, 0)
        high, low = split(tl.cumsum(g, 0))
        end_high, end_low = split(total)
        from_start = tl.exp2(high) * tl.exp2(low)
        to_end = tl.exp2((end_high - high) + (end_low - low))
        kept = tl.exp2(end_high) * tl.exp2(end_low)
        if REVERSE:
            return Decay(high, low, to_end, from_start, kept, total)
        else:
            return Decay(high, low, from_start, to_end, kept, total)


@triton.jit
def split(x):
    """Two float32 numbers whose sum is the float64 number x"""
    high = x.to(tl.float32)
    return high, (x - high.to(tl.float64)).to(tl.float32)


@triton.jit
def decayed_pairs(w, decay, sizes, REVERSE: tl.constexpr):
    """Weights (rows, columns) of a chunk times the decay from the earlier to the later token; 0
    where the column is later than the row, or earlier if REVERSE"""
    index = tl.arange(0, w.shape[0])
    i, j = index[:, None], index[None, :]
    if REVERSE:
        is_pair = j >= i
    else:
        is_pair = j <= i
    if sizes.DECAYED:
        high = decay.high[:, None] - decay.high[None, :]
        between = high + (decay.low[:, None] - decay.low[None, :])
        if REVERSE:
            between = -between
        w *= tl.exp2(tl.where(is_pair, between, 0.0))
    return tl.where(is_pair, w, 0.0)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "slices"])
def decay_gradient_kernel(
    dlog_decay, log_decay, of_queries, of_keys, states, gradients, keys, cu_seqlens,
    rows, B, segment, segments, decay_b, decay_h, decay_l, eps,
    slices, heads, sizes, BLOCK: tl.constexpr,
):  # fmt: skip
    """dlog_decay of one chunk, which is a segment: sum over i >= t of phi(q_i) . dphi(q_i) -
    phi(k_i) . dphi(k_i), plus <dS, S> + <dz, z> at the end.

    dlog_decay is (B, H_kv, rows). of_queries (slices, B, H_q, rows) and of_keys (slices, B, H_kv,
    rows) hold the two products, whose sum over the slices is taken here.
    """
    H_kv = heads.H_q // heads.group
    h = tl.program_id(0) % H_kv
    at = segment_of(tl.program_id(0) // H_kv, cu_seqlens, rows, B, segment, segments)
    if has_no_work(at):
        return
    chunk = chunk_of(at, 0, segment, keys, sizes.CHUNK)
    batches = B if cu_seqlens is None else 1
    row = at.first + chunk.i
    sums = tl.zeros([sizes.CHUNK], tl.float64)
    for n in range(slices):
        entry = tl.cast(n * batches + chunk.b, tl.int64)
        for g in range(h * heads.group, (h + 1) * heads.group):
            of_query = of_queries + (entry * heads.H_q + g) * rows + row
            sums += tl.load(of_query, mask=chunk.inside, other=0.0).to(tl.float64)
        of_key = of_keys + (entry * H_kv + h) * rows + row
        sums -= tl.load(of_key, mask=chunk.inside, other=0.0).to(tl.float64)
    later = tl.sum(sums, 0) - tl.cumsum(sums, 0) + sums
    end = tl.cast(at.base + at.index + 1, tl.int64) * H_kv + h
    SIZE: tl.constexpr = sizes.D * sizes.D_V
    change = dot_product(states.S + end * SIZE, gradients.S + end * SIZE, SIZE, BLOCK)
    at_z = end * sizes.D
    change += dot_product(states.z + at_z, gradients.z + at_z, sizes.D, BLOCK)
    given = decay_pointer(log_decay, at, h, decay_b, decay_h, decay_l)
    given = tl.load(given + tl.cast(chunk.i, tl.int64) * decay_l, mask=chunk.visible, other=0.0)
    counts = chunk.visible & (given >= SMALLEST)
    out = dlog_decay + (tl.cast(chunk.b, tl.int64) * H_kv + h) * rows + row
    tl.store(out, tl.where(counts, later + change, 0.0).to(tl.float32), mask=chunk.inside)


@triton.jit
def dot_product(a, b, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of the products of SIZE elements, in float64: the terms cancel"""
    index = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for n in range(0, SIZE, BLOCK):
        mask = n + index < SIZE
        x = tl.load(a + n + index, mask=mask, other=0.0).to(tl.float64)
        total += x * tl.load(b + n + index, mask=mask, other=0.0).to(tl.float64)
    return tl.sum(total, 0)
