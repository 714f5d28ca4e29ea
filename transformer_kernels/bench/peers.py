"""Peers on CUDA devices: FlexAttention, and packages that are found if they are installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

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

    It is compiled once per case (seconds), which no measured time includes. torch.compile keeps at
    most eight versions of a function: call `torch.compiler.reset` before the ninth case.

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


def missing_reason(package: str) -> str | None:
    """Reason why a package cannot be measured; None if it can."""
    if find_spec(package) is None:
        return f"{package} is not installed"
    return None if torch.cuda.is_available() else "torch finds no CUDA device"


def flash_attn(case: Case) -> Attend:
    """`Variant.attend_for` of flash_attn's `flash_attn_func`: windows and causal masks.

    Raises:
        ValueError: the case has a bias, dropout or another mask.
    """
    left, right = _sides("flash_attn", case)
    window = (-1 if left is None else left, -1 if right is None else right)
    causal = window == (-1, 0)
    function = import_module("flash_attn").flash_attn_func
    options = {"causal": True} if causal else {"window_size": window}
    return _by_tokens(lambda q, k, v: function(q, k, v, **options))


def xformers(case: Case) -> Attend:
    """`Variant.attend_for` of xformers' `memory_efficient_attention`: no mask, or a causal one.

    Raises:
        ValueError: the case has a bias, dropout, grouped heads or another mask.
    """
    sides = _sides("xformers", case)
    if sides not in ((None, None), (None, 0)):
        raise ValueError("xformers is measured without a mask and with a causal one")
    if case.H_q != case.H_kv:
        raise ValueError("xformers is not measured with grouped heads")
    ops = import_module("xformers.ops")
    causal = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask
    mask = causal() if sides == (None, 0) else None
    return _by_tokens(lambda q, k, v: ops.memory_efficient_attention(q, k, v, attn_bias=mask))


def fla(case: Case) -> Attend:
    """`Variant.attend_for` of flash-linear-attention's `parallel_attn`, which is softmax attention
    in Triton: causal, as many queries as keys.

    Raises:
        ValueError: the case has a bias, dropout or another mask.
    """
    if _sides("fla", case) != (None, 0) or case.M != case.N:
        raise ValueError("fla is measured with a causal mask and as many queries as keys")
    function = import_module("fla.ops.attn").parallel_attn
    return _by_tokens(lambda q, k, v: function(q, k, v))


PEERS: dict[str, Callable[[Case], Attend]] = {
    "flash_attn": flash_attn,
    "xformers": xformers,
    "fla": fla,
}
"""`Variant.attend_for` by the name of the package."""


def _by_tokens(function: Any) -> Attend:
    """These packages take (B, S, H, D). Transposing q, k, v and o moves no data."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return o.transpose(1, 2)

    return attend


def _sides(package: str, case: Case) -> tuple[int | None, int | None]:
    """The sides of a window that is aligned with the last key; None if unbounded."""
    check_no_options(package, case)
    if case.mask is None:
        return None, None
    window, *others = case.mask.constraints
    if not isinstance(window, Window) or others:
        names = ", ".join(type(one).__name__ for one in case.mask.constraints)
        raise ValueError(f"{package} is not measured with {names} masks")
    if window.align != "bottom_right" and case.M != case.N:
        raise ValueError(f"{package} aligns masks with the last key, and this one is not")
    if any(side is not None and side < 0 for side in (window.left, window.right)):
        raise ValueError(f"{package} is not measured with windows beside the diagonal")
    return window.left, window.right
