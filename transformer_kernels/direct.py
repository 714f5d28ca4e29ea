"""Attention past torch's dispatcher, for plain calls that nothing could intercept.

A registered operator costs some 10 us a call, and the checks and objects around it as much: more
than a short attention itself. Here the same kernels run by csrc/direct.cpp for a few. There are no
rules of its own: what is not plainly right is declined, and the general path takes the call, or
says what is wrong with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._autograd import _profiler_enabled
from torch.autograd import forward_ad
from torch.nn import Parameter

from transformer_kernels import backends, ops
from transformer_kernels.autograd import first_order
from transformer_kernels.constraints import KeyRange, Window
from transformer_kernels.mask import Mask
from transformer_kernels.problem import SavedForBackward
from transformer_kernels.validate import build_problem

if ops.why_unavailable() is None:
    from transformer_kernels._C import direct_backward, direct_decode, direct_forward

_Window = tuple[int | None, int | None, bool]
_KeyRange = tuple[Tensor | None, Tensor | None]
_Options = tuple[Mask | None, _Window, float | None]

_NO_WINDOW: _Window = (None, None, False)
_ALL_KEYS: _KeyRange = (None, None)

_CPU = backends.CpuBackend()
_PLAIN_TYPES = frozenset((Tensor, Parameter))


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None, grouped: bool = True
) -> Tensor | None:
    """o of a plain call, differentiable to any order; None for what the general path must take.

    Plain are CPU tensors of no subclass, with D = D_v, and a mask of at most one window and one
    key range. `grouped` says whether k and v may have fewer heads than q.
    """
    if _could_be_intercepted() or ops.why_unavailable() is not None:
        return None
    if not (type(q) in _PLAIN_TYPES and type(k) in _PLAIN_TYPES and type(v) in _PLAIN_TYPES):
        return None
    plain = _plain(mask)
    if plain is None or not q.is_cpu:
        return None
    window, keys = plain
    o = torch.empty_like(q)
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return o if direct_forward(q, k, v, *window, *keys, scale, grouped, o, None) else None
    lse = torch.empty(*q.shape[:-1], dtype=_statistics_dtype(q))
    if not direct_forward(q, k, v, *window, *keys, scale, grouped, o, lse):
        return None
    result: Tensor = _apply(q, k, v, keys, (o, lse), (mask, window, scale))  # type: ignore[no-untyped-call]
    return result


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    mask: Mask | None,
    scale: float | None,
) -> Tensor | None:
    """o of a plain call of `attention_decode`; None for what the general path must take."""
    if _could_be_intercepted() or ops.why_unavailable() is not None:
        return None
    if not (
        type(q) in _PLAIN_TYPES
        and type(k_cache) in _PLAIN_TYPES
        and type(v_cache) in _PLAIN_TYPES
        and type(lengths) is Tensor
        and (block_table is None or type(block_table) is Tensor)
    ):
        return None
    plain = _plain(mask)
    if plain is None or plain[1] is not _ALL_KEYS or not q.is_cpu:
        return None
    window = (None, 0, True) if mask is None else plain[0]
    if not window[2]:
        return None
    if torch.is_grad_enabled() and (
        q.requires_grad or k_cache.requires_grad or v_cache.requires_grad
    ):
        return None
    o = torch.empty_like(q)
    given = q, k_cache, v_cache, lengths, block_table
    return o if direct_decode(*given, *window[:2], scale, o) else None


def _could_be_intercepted() -> bool:
    """Whether something wants to see operators, or to replace them: then they must be called."""
    return (
        torch.compiler.is_compiling()
        or _are_functorch_transforms_active()
        or _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or _is_any_autocast_enabled()
        or forward_ad._current_level >= 0
        or _get_tracing_state() is not None
        or _profiler_enabled()
    )


def _plain(mask: Mask | None) -> tuple[_Window, _KeyRange] | None:
    """A window: left, right and whether they count from the bottom right; and a key range: start
    and end. None for any other mask."""
    window, keys = _NO_WINDOW, _ALL_KEYS
    if mask is None:
        return window, keys
    if type(mask) is not Mask:
        return None
    for one in mask.constraints:
        if type(one) is Window and window is _NO_WINDOW:
            window = one.left, one.right, one.align == "bottom_right"
        elif type(one) is KeyRange and keys is _ALL_KEYS:
            keys = one.start, one.end
        else:
            return None
    return window, keys


def _statistics_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


class DirectAttention(torch.autograd.Function):
    """Gives o, which is computed already, its gradient.

    It saves what `autograd.FusedAttention` saves for the same call, in that order: activation
    checkpointing compares the two passes, and one of them may be intercepted.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: _KeyRange,
        computed: tuple[Tensor, Tensor],
        options: _Options,
    ) -> Tensor:
        o, lse = computed
        ctx.save_for_backward(q, k, v, o, lse, *keys)
        ctx.options = options
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, start, end = ctx.saved_tensors
        options: _Options = ctx.options
        mask, window, scale = options
        if not (torch.is_grad_enabled() or _could_be_intercepted()):
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            if direct_backward(q, k, v, *window, start, end, scale, o, lse, do, dq, dk, dv):
                return dq, dk, dv, None, None, None
        problem, extras = build_problem(q, k, v, mask, None, scale, None, 0.0, None, None)
        saved = SavedForBackward(q, k, v, o, lse, None)
        grads = first_order(_CPU, problem, do, None, saved, extras, False)
        return *grads[:3], None, None, None


# What Function.apply adds to it serves functorch, which `attend` has excluded: 2 us.
_apply = super(torch.autograd.Function, DirectAttention).apply
