"""Running sums of log-decays within a chunk, their exponentials, and the gradient of log_decay."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....triton.kernels.decay import LOG2_E, SMALLEST, split
from ....triton.kernels.memory import load_slice, store_slice
from ....triton.kernels.segments import has_no_work, segment_of
from .arguments import UNSPECIALIZED
from .memory import rows_of


class Sums(NamedTuple):
    """Running sums c of the log-decays (tokens, gates) in units of log(2), from the start of the
    chunk, formed in float64 and kept as two float32 numbers, high + low: rounded to one, small
    differences of large sums would lose their bits."""

    high: Any
    low: Any


@triton.jit
def load_sums(high, low, chunk, h, sizes):
    """`Sums` of the tokens; 0 beyond the last one"""
    return Sums(
        load_slice(high, chunk, h, chunk.inside, 0, sizes.GATES, sizes.BLOCK_G),
        load_slice(low, chunk, h, chunk.inside, 0, sizes.GATES, sizes.BLOCK_G),
    )


@triton.jit
def own_decay(high, low, own, h, column, WIDTH: tl.constexpr, sizes):
    """Decay of WIDTH channels between the tokens of a sub-block, (i, j, WIDTH): from token j to i,
    0 if j > i"""
    c_high = load_slice(high, own, h, own.inside, column, sizes.GATES, WIDTH)
    c_low = load_slice(low, own, h, own.inside, column, sizes.GATES, WIDTH)
    index = tl.arange(0, c_high.shape[0])
    is_pair = (index[None, :] <= index[:, None]) & own.inside[:, None]
    later = Sums(c_high[:, None, :], c_low[:, None, :])
    return between(later, Sums(c_high[None, :, :], c_low[None, :, :]), is_pair[:, :, None])


@triton.jit
def from_start(c):
    """Decay from the start of the chunk to a token, it included"""
    return tl.exp2(c.high) * tl.exp2(c.low)


@triton.jit
def between(later, earlier, mask):
    """Decay from the earlier to the later token where `mask`, else 0"""
    c = (later.high - earlier.high) + (later.low - earlier.low)
    return tl.where(mask, tl.exp2(tl.where(mask, c, 0.0)), 0.0)


@triton.jit
def transposed(c):
    return Sums(tl.trans(c.high), tl.trans(c.low))


@triton.jit
def kept(c):
    """Decay of the rows of a state, of the sums (1, gates) of the last token: (BLOCK_D, 1), or one
    number as (1, 1)"""
    return tl.trans(from_start(c))


@triton.jit
def gate_slice(heads, sizes):
    """(chunk number, head, first gate) of this program: slices of CHANNELS gates first"""
    slices: tl.constexpr = (sizes.GATES + sizes.CHANNELS - 1) // sizes.CHANNELS
    column = tl.program_id(0) % slices * sizes.CHANNELS
    h = tl.program_id(0) // slices % heads.H_q
    return tl.program_id(0) // (slices * heads.H_q), h, column


@triton.jit(do_not_specialize=UNSPECIALIZED)
def sums_kernel(
    log_decay, high, low, cu_seqlens,
    rows, B, chunks, beta_b, beta_h, beta_l, scale, heads, sizes,
):  # fmt: skip
    """`Sums` of CHANNELS gates of one chunk and head"""
    number, h, column = gate_slice(heads, sizes)
    at = segment_of(number, cu_seqlens, rows, B, sizes.CHUNK, chunks)
    if has_no_work(at):
        return
    chunk = rows_of(at, at.index * sizes.CHUNK, sizes.CHUNK)
    g = load_slice(log_decay, chunk, h, chunk.inside, column, sizes.GATES, sizes.CHANNELS)
    g = tl.where(g < SMALLEST, SMALLEST, g).to(tl.float64) * LOG2_E
    c_high, c_low = split(tl.cumsum(g, 0))
    store_slice(high, chunk, h, column, c_high, sizes.GATES)
    store_slice(low, chunk, h, column, c_low, sizes.GATES)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def decay_gradient_kernel(
    dlog_decay, log_decay, dc, at_end, cu_seqlens,
    rows, B, chunks, beta_b, beta_h, beta_l, scale, heads, sizes,
):  # fmt: skip
    """dlog_decay of CHANNELS gates of one chunk and head: the sum of dc over the tokens i >= t, and
    at_end (chunks, H_v, gates)"""
    number, h, column = gate_slice(heads, sizes)
    at = segment_of(number, cu_seqlens, rows, B, sizes.CHUNK, chunks)
    if has_no_work(at):
        return
    chunk = rows_of(at, at.index * sizes.CHUNK, sizes.CHUNK)
    terms = load_slice(dc, chunk, h, chunk.inside, column, sizes.GATES, sizes.CHANNELS).to(
        tl.float64
    )
    later = tl.sum(terms, 0)[None, :] - tl.cumsum(terms, 0) + terms
    gates = column + tl.arange(0, sizes.CHANNELS)
    end = at_end + (tl.cast(at.base + at.index, tl.int64) * heads.H_q + h) * sizes.GATES + gates
    later += tl.load(end, mask=gates < sizes.GATES, other=0.0).to(tl.float64)[None, :]
    given = load_slice(log_decay, chunk, h, chunk.inside, column, sizes.GATES, sizes.CHANNELS)
    y = tl.where(given >= SMALLEST, later, 0.0)
    store_slice(dlog_decay, chunk, h, column, y, sizes.GATES)
