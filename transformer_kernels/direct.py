"""Attention past torch's dispatcher, for plain calls that nothing could intercept.

A registered operator costs some 10 us a call, and the checks and objects around it as much: more
than a short attention itself. Here the same kernels run by csrc/direct.cpp for a few. There are no
rules of its own: what is not plainly right is declined, and the general path takes the call, or
says what is wrong with it.
"""

from __future__ import annotations

from dataclasses import replace
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
from transformer_kernels.bound_mask import BoundMask, bind
from transformer_kernels.constraints import Window
from transformer_kernels.mask import Mask
from transformer_kernels.problem import Extras, SavedForBackward
from transformer_kernels.validate import build_problem
from transformer_kernels.validate_decode import decode_diagonals

if ops.why_unavailable() is None:
    from transformer_kernels._C import direct_backward, direct_decode, direct_forward

_EVERYTHING = BoundMask()
_CPU = backends.CpuBackend()
_PLAIN_TYPES = frozenset((Tensor, Parameter))


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None, grouped: bool = True
) -> Tensor | None:
    """o of a plain call, differentiable to any order; None for what the general path must take.

    Plain are CPU tensors of no subclass, with D = D_v, under any mask. `grouped` says whether k and
    v may have fewer heads than q.
    """
    if _could_be_intercepted() or ops.why_unavailable() is not None:
        return None
    if not (type(q) in _PLAIN_TYPES and type(k) in _PLAIN_TYPES and type(v) in _PLAIN_TYPES):
        return None
    bound = _bound(mask, q, k) if q.is_cpu else None
    if bound is None:
        return None
    o, summary = torch.empty_like(q), _empty_summary(bound, q, k)
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return o if direct_forward(q, k, v, *bound, summary, scale, grouped, o, None) else None
    lse = torch.empty(*q.shape[:-1], dtype=_statistics_dtype(q))
    if not direct_forward(q, k, v, *bound, summary, scale, grouped, o, lse):
        return None
    computed = o, lse, summary
    result: Tensor = _apply(q, k, v, computed, bound, scale)  # type: ignore[no-untyped-call]
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
    diagonals = _diagonals(mask)
    if diagonals is None or not q.is_cpu:
        return None
    if torch.is_grad_enabled() and (
        q.requires_grad or k_cache.requires_grad or v_cache.requires_grad
    ):
        return None
    o = torch.empty_like(q)
    given = q, k_cache, v_cache, lengths, block_table
    return o if direct_decode(*given, *diagonals, scale, o) else None


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


def _bound(mask: Mask | None, q: Tensor, k: Tensor) -> BoundMask | None:
    """None where something does not fit, or is on another device."""
    if mask is None:
        return _EVERYTHING
    if type(mask) is not Mask:
        return None
    try:
        B, H, M, _ = q.shape
        _, _, N, _ = k.shape
        return bind(mask, B, H, M, N)
    except (ValueError, RuntimeError):
        return None


def _diagonals(mask: Mask | None) -> tuple[int, int] | None:
    """Of windows that count from the end; None for any other mask."""
    plain = mask is None or (
        type(mask) is Mask
        and all(type(one) is Window and one.align == "bottom_right" for one in mask.constraints)
    )
    return decode_diagonals(mask) if plain else None


def _empty_summary(bound: BoundMask, q: Tensor, k: Tensor) -> Tensor | None:
    """Room for the block summary; None where there is none."""
    if not ops.needs_summary(bound):
        return None
    shape = ops.summary_shape(q, k, bound.q_segments, bound.dense, bound.layout)
    return torch.empty(shape, dtype=torch.uint8)


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
        computed: tuple[Tensor, Tensor, Tensor | None],
        bound: BoundMask,
        scale: float | None,
    ) -> Tensor:
        o, lse, summary = computed
        low, high, *tensors, block_size = bound
        ctx.save_for_backward(q, k, v, o, lse, summary, *tensors)
        ctx.numbers = low, high, block_size, scale
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, summary, *tensors = ctx.saved_tensors
        low, high, block_size, scale = ctx.numbers
        if not (torch.is_grad_enabled() or _could_be_intercepted()):
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            bound = BoundMask._make((low, high, *tensors, block_size))
            if direct_backward(q, k, v, *bound, summary, scale, o, lse, do, dq, dk, dv):
                return dq, dk, dv, None, None, None
        problem, _ = build_problem(q, k, v, None, None, scale, None, 0.0, None, None)
        problem = replace(problem, diagonal_low=low, diagonal_high=high, block_size=block_size)
        saved = SavedForBackward(q, k, v, o, lse, summary)
        extras = Extras(None, None, None, *tensors)
        grads = first_order(_CPU, problem, do, None, saved, extras, False)
        return *grads[:3], None, None, None


# What Function.apply adds to it serves functorch, which `attend` has excluded: 2 us.
_apply = super(torch.autograd.Function, DirectAttention).apply
