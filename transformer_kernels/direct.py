"""Attention past torch's dispatcher, for plain calls that nothing could intercept.

A registered operator costs some 10 us a call, and the checks and objects around it as much: more
than a short attention itself. Here the same kernels run by csrc/direct.cpp for a few. There are no
rules of its own: what is not plainly right is declined, and the general path takes the call, or
says what is wrong with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from transformer_kernels.constraints import (
    BlockSparse,
    Constraint,
    Dense,
    KeyRange,
    Segments,
    Window,
)
from transformer_kernels.mask import Mask
from transformer_kernels.problem import SavedForBackward
from transformer_kernels.validate import build_problem

if ops.why_unavailable() is None:
    from transformer_kernels._C import direct_backward, direct_decode, direct_forward

_Window = tuple[int | None, int | None, bool]


class _PlainMask(NamedTuple):
    """A mask of at most one constraint of each kind, as csrc/direct_mask.cpp reads it."""

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    key_start: Tensor | None = None
    key_end: Tensor | None = None
    q_segments: Tensor | None = None
    k_segments: Tensor | None = None
    dense: Tensor | None = None
    layout: Tensor | None = None
    block_size: int = 0

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[3:9]

    def empty_summary(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Room for the block summary; None where there is none."""
        if self.q_segments is None and self.dense is None and self.layout is None:
            return None
        if q.dim() != 4 or k.dim() != 4:
            return None
        shape = ops.summary_shape(q, k, self.q_segments, self.dense, self.layout)
        return torch.empty(shape, dtype=torch.uint8)


_EVERYTHING = _PlainMask()
_Options = tuple[Mask | None, _PlainMask, float | None]

_CPU = backends.CpuBackend()
_PLAIN_TYPES = frozenset((Tensor, Parameter))


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None, grouped: bool = True
) -> Tensor | None:
    """o of a plain call, differentiable to any order; None for what the general path must take.

    Plain are CPU tensors of no subclass, with D = D_v, and a mask of at most one constraint of each
    kind. `grouped` says whether k and v may have fewer heads than q.
    """
    if _could_be_intercepted() or ops.why_unavailable() is not None:
        return None
    if not (type(q) in _PLAIN_TYPES and type(k) in _PLAIN_TYPES and type(v) in _PLAIN_TYPES):
        return None
    plain = _plain(mask)
    if plain is None or not q.is_cpu:
        return None
    o, summary = torch.empty_like(q), plain.empty_summary(q, k)
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return o if direct_forward(q, k, v, *plain, summary, scale, grouped, o, None) else None
    lse = torch.empty(*q.shape[:-1], dtype=_statistics_dtype(q))
    if not direct_forward(q, k, v, *plain, summary, scale, grouped, o, lse):
        return None
    computed = o, lse, summary
    result: Tensor = _apply(q, k, v, computed, (mask, plain, scale))  # type: ignore[no-untyped-call]
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
    window = (None, 0, True) if mask is None else _window(mask)
    if window is None or not window[2] or not q.is_cpu:
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


def _window(mask: Mask) -> _Window | None:
    """left, right and whether they count from the bottom right; None for any other mask."""
    if type(mask) is Mask and len(mask.constraints) == 1:
        constraint = mask.constraints[0]
        if type(constraint) is Window:
            return constraint.left, constraint.right, constraint.align == "bottom_right"
    return None


def _plain(mask: Mask | None) -> _PlainMask | None:
    """None for a mask with several constraints of a kind, which must be merged."""
    if mask is None:
        return _EVERYTHING
    if type(mask) is not Mask:
        return None
    window = _window(mask)
    if window is not None:
        return _PlainMask(*window)
    fields: dict[str, Any] = {}
    for one in mask.constraints:
        these = _fields(one)
        if not fields.keys().isdisjoint(these):
            return None
        fields |= these
    return _PlainMask(**fields)


def _fields(constraint: Constraint) -> dict[str, Any]:
    match constraint:
        case Window(left, right, align):
            return {"left": left, "right": right, "bottom_right": align == "bottom_right"}
        case KeyRange(start, end):
            return {"key_start": start, "key_end": end}
        case Segments(q_ids, k_ids):
            return {"q_segments": q_ids, "k_segments": k_ids}
        case Dense(shown):
            return {"dense": shown}
        case BlockSparse(layout, block_size):
            return {"layout": layout, "block_size": block_size}


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
        options: _Options,
    ) -> Tensor:
        o, lse, summary = computed
        ctx.save_for_backward(q, k, v, o, lse, summary, *options[1].tensors())
        ctx.options = options
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, summary, *tensors = ctx.saved_tensors
        options: _Options = ctx.options
        mask, plain, scale = options
        if not (torch.is_grad_enabled() or _could_be_intercepted()):
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            plain = _PlainMask._make((*plain[:3], *tensors, plain.block_size))
            if direct_backward(q, k, v, *plain, summary, scale, o, lse, do, dq, dk, dv):
                return dq, dk, dv, None, None
        problem, extras = build_problem(q, k, v, mask, None, scale, None, 0.0, None, None)
        saved = SavedForBackward(q, k, v, o, lse, summary)
        grads = first_order(_CPU, problem, do, None, saved, extras, False)
        return *grads[:3], None, None


# What Function.apply adds to it serves functorch, which `attend` has excluded: 2 us.
_apply = super(torch.autograd.Function, DirectAttention).apply
