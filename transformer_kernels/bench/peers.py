"""Variants of other packages for CUDA devices, found if they are installed.

All of them take (B, S, H, D), so that the calls transpose q, k, v and o, which moves no data.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..masks.constraints import Window
from .cases import Attend, Case, check_no_options


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
