"""The recurrence, token by token, for few tokens. The state stays in registers."""

import triton
import triton.language as tl

from ....triton.kernels.decay import SMALLEST
from ....triton.kernels.memory import load_slice, store_slice
from ....triton.kernels.segments import first_segment, program_slice
from .arguments import UNSPECIALIZED
from .memory import (
    load_beta,
    load_matrix,
    load_unit,
    load_values,
    rows_of,
    store_matrix,
)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def steps_kernel(
    q, k, v, o, log_decay, beta, S, cu_seqlens,
    rows, B, chunks, beta_b, beta_h, beta_l, scale, heads, sizes,
):  # fmt: skip
    """o and, in place, the state S of one head, SLICE columns"""
    b, h, column = program_slice(heads.H_q, sizes.D_V, sizes)
    at = first_segment(b, cu_seqlens, rows, sizes.CHUNK, chunks)
    state = load_matrix(S, b, h, heads, column, sizes)
    for token in range(rows):
        one = rows_of(at, token, 1)
        g = load_slice(log_decay, one, h, one.inside, 0, sizes.GATES, sizes.BLOCK_G)
        state *= tl.exp(tl.trans(tl.where(g < SMALLEST, SMALLEST, g)))
        key, _ = load_unit(k, one, h // sizes.GROUP, sizes)
        query, _ = load_unit(q, one, h // sizes.GROUP, sizes)
        key, query = tl.trans(key), tl.trans(query) * scale
        r = load_values(v, one, h, column, sizes) - tl.sum(key * state, 0)[None, :]
        u = r * load_beta(beta, one, h, beta_b, beta_h, beta_l)[:, None]
        state += key * u
        store_slice(o, one, h, column, tl.sum(query * state, 0)[None, :], sizes.D_V)
    store_matrix(S, b, h, heads, column, state, sizes)
