"""Statistics of queries: 1 / l and delta = do . o."""

import triton
import triton.language as tl

from ....backends.triton.kernels.primitives import vector_pointer
from .memory import load_slice
from .segments import Chunk


@triton.jit
def load_statistics(statistics, heads, rows, chunk, h):
    """(1 / l, delta) of a chunk of queries; (1, 0) beyond the last one"""
    i = tl.arange(0, chunk.i.shape[0])
    normalizer = vector_pointer(statistics.normalizer, heads, rows, chunk.b, h, chunk.row) + i
    delta = vector_pointer(statistics.delta, heads, rows, chunk.b, h, chunk.row) + i
    inverse = 1.0 / tl.load(normalizer, mask=chunk.inside, other=1.0)
    return inverse, tl.load(delta, mask=chunk.inside, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def delta_kernel(o, do, delta, rows, heads, sizes):
    """delta of CHUNK rows of one head"""
    blocks = tl.cdiv(rows, sizes.CHUNK)
    first = tl.program_id(0) % blocks * sizes.CHUNK
    h = tl.program_id(0) // blocks % heads.H_q
    b = tl.program_id(0) // (blocks * heads.H_q)
    i = first + tl.arange(0, sizes.CHUNK)
    chunk = Chunk(b, first, i, i < rows, i < rows)
    total = tl.zeros([sizes.CHUNK], tl.float32)
    for column in range(0, sizes.D_V, sizes.SLICE):
        x = load_slice(o, chunk, h, chunk.inside, column, sizes.D_V, sizes.SLICE)
        y = load_slice(do, chunk, h, chunk.inside, column, sizes.D_V, sizes.SLICE)
        total += tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    tl.store(vector_pointer(delta, heads, rows, b, h, 0) + i, total, mask=chunk.inside)
