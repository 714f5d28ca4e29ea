"""Gradient of log_decay; docs/linear.md, section 3."""

import triton
import triton.language as tl

from .arguments import UNSPECIALIZED
from .decay import SMALLEST, decay_pointer
from .segments import chunk_of, has_no_work, segment_of


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
