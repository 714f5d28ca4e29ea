"""torch's FlexAttention, compiled, as a variant that is measured.

torch is asked for it when a case is bound: compiling costs seconds, and no time includes it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)

from transformer_kernels.bench.cases import Attend, Case, refuse_options
from transformer_kernels.masks.constraints import (
    BlockSparse,
    Constraint,
    KeyRange,
    Segments,
    Window,
)

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""b, h, i, j -> whether the pair is visible"""


def flex(case: Case) -> Attend:
    """`Variant.bind`. A case gets code of its own: sizes are constants there, as in its best use.

    torch keeps eight versions of a function and refuses a ninth: before it, `torch.compiler.reset`
    is due. ValueError for options and masks that are not measured.
    """
    refuse_options("FlexAttention", case)
    block_mask = _block_mask(case)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=grouped)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return attend(q, k, v)
        # Inference runs the same forward kernel: this spares compiling it once more.
        with torch.enable_grad():
            return attend(*(x.detach().requires_grad_() for x in (q, k, v))).detach()

    return call


def _block_mask(case: Case) -> BlockMask | None:
    if case.mask is None:
        return None
    by_batch = any(isinstance(c, KeyRange | Segments) for c in case.mask.constraints)
    return create_block_mask(
        mask_mod(case), case.B if by_batch else None, None, case.M, case.N, device=case.device
    )


def mask_mod(case: Case) -> MaskMod:
    """The case's mask as FlexAttention asks for it; it has one."""
    assert case.mask is not None
    mods = [_mod(constraint, case.M, case.N) for constraint in case.mask.constraints]
    return mods[0] if len(mods) == 1 else and_masks(*mods)


def _mod(constraint: Constraint, M: int, N: int) -> MaskMod:
    match constraint:
        case Window():
            return _within(*constraint.diagonals(M, N))
        case KeyRange(start, end):
            return _in_range(start, end)
        case Segments(q_ids, k_ids):
            return lambda b, h, i, j: q_ids[b, i] == k_ids[b, j]
        case BlockSparse(layout, size) if len(layout) == 1:
            blocks = layout[0]
            return lambda b, h, i, j: blocks[i // size, j // size]
    raise ValueError(f"FlexAttention is not measured with {type(constraint).__name__} masks")


def _within(low: int | None, high: int | None) -> MaskMod:
    if high is None:
        if low is None:
            raise ValueError("FlexAttention is not measured with a window that hides nothing")
        return lambda b, h, i, j: j >= i + low
    if low is None:
        return lambda b, h, i, j: j <= i + high
    return lambda b, h, i, j: (j <= i + high) & (j >= i + low)


def _in_range(start: Tensor | None, end: Tensor) -> MaskMod:
    if start is None:
        return lambda b, h, i, j: j < end[b]
    return lambda b, h, i, j: (j >= start[b]) & (j < end[b])
