"""The recurrence, token by token, for few tokens. The state stays in registers."""

import triton
import triton.language as tl

from ....backends.triton.kernels.primitives import head
from .arithmetic import features
from .decay import SMALLEST
from .memory import load_state, store_state
from .segments import program_slice


@triton.jit(do_not_specialize=["tokens", "decay_b", "decay_h", "decay_l", "eps"])
def steps_kernel(
    q, k, v, o, log_decay, start, end, tokens, decay_b, decay_h, decay_l, eps, heads, sizes
):
    """o and the final state of one key head, for SLICE columns of v. start and end share S, but not
    z, which the programs of other slices read."""
    H_kv = heads.H_q // heads.group
    b, h, first = program_slice(H_kv, sizes.D_V, sizes)
    row, column = tl.arange(0, sizes.BLOCK_D), first + tl.arange(0, sizes.SLICE)
    in_k, in_v = row < sizes.D, column < sizes.D_V
    S, z = load_state(start, b, h, heads, first, sizes, False)
    for n in range(tokens):
        if sizes.DECAYED:
            at = tl.cast(b, tl.int64) * decay_b + tl.cast(h, tl.int64) * decay_h
            g = tl.load(log_decay + at + tl.cast(n, tl.int64) * decay_l)
            kept = tl.exp(tl.where(g < SMALLEST, SMALLEST, g))
            S, z = S * kept, z * kept
        key = tl.load(head(k, b, h, n).data + row, mask=in_k, other=0.0)
        key = tl.where(in_k, features(key, sizes), 0.0)
        value = tl.load(head(v, b, h, n).data + column, mask=in_v, other=0.0).to(tl.float32)
        S, z = S + key[:, None] * value[None, :], z + key
        for g in range(h * heads.group, (h + 1) * heads.group):
            query = tl.load(head(q, b, g, n).data + row, mask=in_k, other=0.0)
            query = tl.where(in_k, features(query, sizes), 0.0)
            y = tl.sum(query[:, None] * S, 0)
            if sizes.NORMALIZE:
                y /= tl.sum(query * z, 0) + eps
            to = head(o, b, g, n).data + column
            tl.store(to, y.to(o.data.dtype.element_ty), mask=in_v)
    store_state(end, b, h, heads, first, S, z, sizes)
