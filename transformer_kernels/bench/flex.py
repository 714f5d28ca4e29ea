"""The FlexAttention variant: torch's flex_attention under torch.compile.

It is compiled once per case (seconds), which no measured time includes.
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

from ..masks.constraints import BlockSparse, Constraint, KeyRange, Segments, Window
from .cases import Attend, Case, check_no_options

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Maps (b, h, i, j) to True if the pair is visible."""


def flex(case: Case) -> Attend:
    """`Variant.attend_for` of FlexAttention, compiled for static shapes, its fastest mode.

    torch.compile keeps at most eight versions of a function: call `torch.compiler.reset` before the
    ninth case.

    Raises:
        ValueError: the case has a bias, dropout or a mask that is not measured.
    """
    check_no_options("FlexAttention", case)
    block_mask = _block_mask(case)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=grouped)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return attend(q, k, v)
        # Inference runs the same forward kernel; with grad enabled it is not compiled again.
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
    """Returns the case's mask as a `mask_mod` of FlexAttention. The case must have a mask."""
    assert case.mask is not None
    mods = [_mod(constraint, case.M, case.N) for constraint in case.mask.constraints]
    return mods[0] if len(mods) == 1 else and_masks(*mods)


def _mod(constraint: Constraint, M: int, N: int) -> MaskMod:
    match constraint:
        case Window():
            return _in_band(*constraint.diagonals(constraint.offset(M, N)))
        case KeyRange(start, end):
            return _in_range(start, end)
        case Segments(q_ids, k_ids, True):
            return lambda b, h, i, j: q_ids[b, i] == k_ids[b, j]
        case BlockSparse(patterns, size) if len(patterns) == 1:
            blocks = patterns[0]
            return lambda b, h, i, j: blocks[i // size, j // size]
    raise ValueError(f"FlexAttention is not measured with {type(constraint).__name__} masks")


def _in_band(low: int | None, high: int | None) -> MaskMod:
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
