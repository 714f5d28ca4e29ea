"""States at the boundaries of segments: the sums of each segment, then their prefix sums."""

import triton
import triton.language as tl

from .arguments import UNSPECIALIZED
from .arithmetic import add_product
from .decay import decay_pointer, load_decay, split
from .memory import load_features, load_slice, store_state
from .segments import chunk_of, chunks_of, first_segment, has_no_work, program_slice, segment_of
from .statistics import load_statistics

LOADS = tl.constexpr(8)
"""Loads of `prefix_kernel` in flight: the sums of so many segments."""


@triton.jit(do_not_specialize=UNSPECIALIZED)
def sums_kernel(
    x, c, statistics, log_decay, keys, sums, kept, cu_seqlens,
    rows, B, segment, segments, decay_b, decay_h, decay_l, eps,
    heads, sizes, REVERSE: tl.constexpr,
):  # fmt: skip
    """Sums of phi(k) v^T and phi(k) over a segment, written to its end; or, if REVERSE, of f do^T
    and -delta f with f = phi(q) / l, written to its start. kept (boundaries, H_kv) receives the
    factor by which the segment decays a state."""
    H_kv = heads.H_q // heads.group
    number, h, column = program_slice(H_kv, sizes.D_V, sizes)
    at = segment_of(number, cu_seqlens, rows, B, segment, segments)
    if has_no_work(at):
        return
    if sizes.DECAYED:
        log_decay = decay_pointer(log_decay, at, h, decay_b, decay_h, decay_l)
    S = tl.zeros([sizes.BLOCK_D, sizes.SLICE], tl.float32)
    z = tl.zeros([sizes.BLOCK_D], tl.float32)
    total = tl.full([], 0.0, tl.float64)
    chunks = chunks_of(at, segment, sizes.CHUNK)
    for step in range(chunks):
        n = chunks - 1 - step if REVERSE else step
        chunk = chunk_of(at, n, segment, keys, sizes.CHUNK)
        decay = load_decay(log_decay, chunk, decay_l, sizes, REVERSE)
        if sizes.DECAYED:
            S, z, total = S * decay.kept, z * decay.kept, total + decay.total
        if REVERSE:
            for g in range(h * heads.group, (h + 1) * heads.group):
                S, z = add_rows(
                    S, z, x, c, chunk, g, chunk.inside, column, statistics, decay,
                    rows, heads, sizes, REVERSE,
                )  # fmt: skip
        else:
            S, z = add_rows(
                S, z, x, c, chunk, h, chunk.visible, column, statistics, decay,
                rows, heads, sizes, REVERSE,
            )  # fmt: skip
    boundary = at.base + at.index if REVERSE else at.base + at.index + 1
    store_state(sums, boundary, h, heads, column, S, z, sizes)
    if sizes.DECAYED:
        if column == 0:
            high, low = split(total)
            tl.store(kept + (at.base + at.index) * H_kv + h, tl.exp2(high) * tl.exp2(low))


@triton.jit
def add_rows(
    S, z, x, c, chunk, h, live, column, statistics, decay,
    rows, heads, sizes, REVERSE: tl.constexpr,
):  # fmt: skip
    """Adds the rows of one head and chunk to S and z"""
    f = load_features(x, chunk, h, live, 0, sizes.BLOCK_D, sizes)
    c_tile = load_slice(c, chunk, h, live, column, sizes.D_V, sizes.SLICE)
    if sizes.DECAYED:
        f *= decay.leave[:, None]
    if not REVERSE:
        z += tl.sum(f, 0)
    elif sizes.NORMALIZE:
        inverse, delta = load_statistics(statistics, heads, rows, chunk, h)
        f *= inverse[:, None]
        z -= tl.sum(f * delta[:, None], 0)
    return add_product(S, tl.trans(f), c_tile, sizes), z


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "size", "H_kv"])
def prefix_kernel(
    sums, states, kept, start, end, cu_seqlens,
    rows, B, segment, segments, decay_b, decay_h, decay_l, eps,
    size, H_kv, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turns the sums of the segments, (boundaries, H_kv, size), into states of the same shape, for
    BLOCK elements of one head. start (B, H_kv, size) is the state before the first segment, or
    after the last one if REVERSE; None is zero. end, if not None, receives the last result. The
    running state is float64."""
    blocks = tl.cdiv(size, BLOCK)
    element = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    h = tl.program_id(0) // blocks % H_kv
    b = tl.program_id(0) // (blocks * H_kv)
    at = first_segment(b, cu_seqlens, rows, segment, segments)
    mask = element < size
    own = (tl.cast(b, tl.int64) * H_kv + h) * size + element
    x = tl.zeros([BLOCK], tl.float64)
    if start is not None:
        x += tl.load(start + own, mask=mask, other=0.0)
    place = at.base + at.count if REVERSE else at.base
    place = (tl.cast(place, tl.int64) * H_kv + h) * size + element
    tl.store(states + place, x.to(states.dtype.element_ty), mask=mask)
    for step in tl.range(at.count, num_stages=LOADS):
        i = at.base + (at.count - 1 - step if REVERSE else step)  # the segment
        n = i if REVERSE else i + 1
        place = (tl.cast(n, tl.int64) * H_kv + h) * size + element
        if kept is not None:
            x *= tl.load(kept + i * H_kv + h)
        x += tl.load(sums + place, mask=mask, other=0.0)
        tl.store(states + place, x.to(states.dtype.element_ty), mask=mask)
    if end is not None:
        tl.store(end + own, x.to(tl.float32), mask=mask)
