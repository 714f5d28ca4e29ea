"""Segments and chunks: position of a program in the sequences, and of a step of its loop.

A segment is a run of chunks of one sequence. Sequence b has n segments and n + 1 boundaries:
segment i is between the boundaries i and i + 1. The number of boundary i is b (n + 1) + i in dense
calls. In packed calls it is cu_seqlens[b] // segment + 2 b + i: distinct for all sequences, without
a sum over them. Packed programs have these numbers, so that some have no segment.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....backends.triton.kernels.primitives import sequence_rows


class Segment(NamedTuple):
    """Segment of a sequence."""

    b: Any
    """sequence"""
    memory_b: Any
    """batch entry in memory: 0 if sequences are packed"""
    first: Any
    """row of the sequence's first token"""
    tokens: Any
    """tokens of the sequence"""
    index: Any
    """segment of the sequence"""
    count: Any
    """segments of the sequence; 0 only if a packed sequence has no tokens"""
    base: Any
    """number of the sequence's boundary 0"""


class Chunk(NamedTuple):
    """Chunk of a sequence."""

    b: Any
    """batch entry in memory"""
    row: Any
    """row of the first token"""
    i: Any
    """tokens of the sequence (CHUNK)"""
    inside: Any
    """True for tokens that exist (CHUNK)"""
    visible: Any
    """True for tokens whose keys are visible (CHUNK)"""


@triton.jit
def program_slice(heads, WIDTH: tl.constexpr, sizes):
    """(segment number, head, first column) of this program: slices of WIDTH columns first"""
    slices: tl.constexpr = (WIDTH + sizes.SLICE - 1) // sizes.SLICE
    column = tl.program_id(0) % slices * sizes.SLICE
    h = tl.program_id(0) // slices % heads
    return tl.program_id(0) // (slices * heads), h, column


@triton.jit
def segment_of(number, cu_seqlens, rows, B, segment, segments):
    """Segment with this number"""
    if cu_seqlens is None:
        b = number // segments
        return Segment(b, b, 0, rows, number % segments, segments, b * (segments + 1))
    else:
        low = 0
        high = B
        while high - low > 1:
            middle = (low + high) // 2
            first, _ = sequence_rows(cu_seqlens + middle, rows)
            is_after = first // segment + 2 * middle > number
            low = tl.where(is_after, low, middle)
            high = tl.where(is_after, middle, high)
        return packed_segment(low, number, cu_seqlens, rows, segment)


@triton.jit
def first_segment(b, cu_seqlens, rows, segment, segments):
    """Segment 0 of sequence b"""
    if cu_seqlens is None:
        return Segment(b, b, 0, rows, 0, segments, b * (segments + 1))
    else:
        first, _ = sequence_rows(cu_seqlens + b, rows)
        return packed_segment(b, first // segment + 2 * b, cu_seqlens, rows, segment)


@triton.jit
def packed_segment(b, number, cu_seqlens, rows, segment):
    first, tokens = sequence_rows(cu_seqlens + b, rows)
    base = first // segment + 2 * b
    return Segment(b, 0, first, tokens, number - base, tl.cdiv(tokens, segment), base)


@triton.jit
def has_no_work(at):
    """True for packed programs beyond the segments. Offsets that decrease, an error, can make the
    index negative."""
    return (at.index < 0) | (at.index >= at.count)


@triton.jit
def start_boundary(at, REVERSE: tl.constexpr):
    """Number of the boundary at which the segment starts, or ends if REVERSE"""
    return at.base + at.index + (1 if REVERSE else 0)


@triton.jit
def chunks_of(at, segment, CHUNK: tl.constexpr):
    """Number of chunks of the segment"""
    return tl.cdiv(tl.maximum(tl.minimum(segment, at.tokens - at.index * segment), 0), CHUNK)


@triton.jit
def chunk_of(at, n, segment, keys, CHUNK: tl.constexpr):
    """The n-th chunk of the segment"""
    i0 = at.index * segment + n * CHUNK
    i = i0 + tl.arange(0, CHUNK)
    inside = i < at.tokens
    visible = inside
    if keys.end is not None:
        visible = visible & (i < tl.load(keys.end + at.b))
    if keys.start is not None:
        visible = visible & (i >= tl.load(keys.start + at.b))
    return Chunk(at.memory_b, at.first + i0, i, inside, visible)
