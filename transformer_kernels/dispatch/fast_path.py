"""CPU fast path: plain calls bypass torch's dispatcher.

A registered operator costs about 10 us per call, and the checks and objects around it as much. That
exceeds the time of a short attention. csrc/bindings/fast_path calls the same kernels in a few
microseconds. It declines every call that is not plainly valid; the general path then runs the call
or raises its error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_kernels import torch_private
from transformer_kernels.argument_checks import savable
from transformer_kernels.backends import CpuBackend, schema
from transformer_kernels.backends.native import extension
from transformer_kernels.dispatch.autograd import first_order
from transformer_kernels.masks.constraints import Window
from transformer_kernels.masks.mask import Mask
from transformer_kernels.masks.resolved import ResolvedMask, resolve
from transformer_kernels.problem import SavedForBackward, TensorArgs
from transformer_kernels.problem.attention import build_problem
from transformer_kernels.problem.decode import decode_diagonals
from transformer_kernels.torch_private import MISSING_FOR_FAST_PATH, calls_are_observed

if extension.unavailable_reason() is None:
    direct_forward = extension.compiled.direct_forward
    direct_backward = extension.compiled.direct_backward
    direct_decode = extension.compiled.direct_decode

_ALL_VISIBLE = ResolvedMask()
_CPU = CpuBackend()
_PLAIN_TYPES = frozenset((Tensor, Parameter))


def unavailable_reason() -> str | None:
    """Returns the reason why the fast path is disabled; None if it is enabled."""
    if MISSING_FOR_FAST_PATH:
        return f"torch {torch.__version__} lacks {', '.join(MISSING_FOR_FAST_PATH)}"
    return extension.unavailable_reason()


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None, grouped: bool = True
) -> Tensor | None:
    """Returns o, differentiable to any order; None if the call needs the general path.

    A plain call has CPU tensors of no subclass, D = D_v and any mask. `grouped` is True if k and v
    may have fewer heads than q.
    """
    if unavailable_reason() is not None or calls_are_observed():
        return None
    if not (type(q) in _PLAIN_TYPES and type(k) in _PLAIN_TYPES and type(v) in _PLAIN_TYPES):
        return None
    resolved = _resolve(mask, q, k) if q.is_cpu else None
    if resolved is None:
        return None
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    try:
        o, block_mask = torch.empty_like(q), _empty_block_mask(resolved, q, k)
        lse = torch.empty(*q.shape[:-1], dtype=_statistics_dtype(q)) if needs_grad else None
    except (RuntimeError, TypeError):  # unchecked tensors; the general path names what is wrong
        return None
    if not direct_forward(q, k, v, *resolved, block_mask, scale, grouped, o, lse):
        return None
    if lse is None:
        return o
    computed = o, lse, block_mask
    result: Tensor
    try:
        result = _apply(q, k, v, computed, resolved, scale)
    except RuntimeError:
        if not any(isinstance(x, Tensor) and x.is_inference() for x in (q, k, v, *resolved)):
            raise
        q, k, v = savable(q), savable(k), savable(v)
        resolved = ResolvedMask._make(savable(x) if isinstance(x, Tensor) else x for x in resolved)
        result = _apply(q, k, v, (o.detach(), lse, block_mask), resolved, scale)
    return result


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    mask: Mask | None,
    scale: float | None,
) -> Tensor | None:
    """Returns o of an `attention_decode` call; None if the call needs the general path."""
    if unavailable_reason() is not None or calls_are_observed():
        return None
    if not (
        type(q) in _PLAIN_TYPES
        and type(k_cache) in _PLAIN_TYPES
        and type(v_cache) in _PLAIN_TYPES
        and type(cache_seqlens) is Tensor
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
    try:
        o = torch.empty_like(q)
    except RuntimeError:
        return None
    given = q, k_cache, v_cache, cache_seqlens, block_table
    return o if direct_decode(*given, *diagonals, scale, o) else None


def _resolve(mask: Mask | None, q: Tensor, k: Tensor) -> ResolvedMask | None:
    """Resolves the mask; None if it does not fit the sizes or is on another device."""
    if mask is None:
        return _ALL_VISIBLE
    if type(mask) is not Mask:
        return None
    try:
        B, H, M, _ = q.shape
        _, _, N, _ = k.shape
        return resolve(mask, B, H, M, N)
    except (ValueError, RuntimeError):
        return None


def _diagonals(mask: Mask | None) -> tuple[int, int] | None:
    """Returns the diagonals of bottom-right aligned windows; None for any other mask."""
    plain = mask is None or (
        type(mask) is Mask
        and all(type(one) is Window and one.align == "bottom_right" for one in mask.constraints)
    )
    return decode_diagonals(mask) if plain else None


def _empty_block_mask(resolved: ResolvedMask, q: Tensor, k: Tensor) -> Tensor | None:
    """Allocates the block mask; None if the mask needs none."""
    if not schema.needs_block_mask(resolved):
        return None
    shape = schema.block_mask_shape(q, k, resolved.q_segments, resolved.dense, resolved.layout)
    return torch.empty(shape, dtype=torch.uint8)


def _statistics_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


class DirectAttention(torch.autograd.Function):
    """Attaches the backward pass to an o that is already computed.

    It saves the same tensors in the same order as `autograd.FusedAttention`: activation
    checkpointing compares the saved tensors of two passes, and one of them may take the general
    path.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        computed: tuple[Tensor, Tensor, Tensor | None],
        resolved: ResolvedMask,
        scale: float | None,
    ) -> Tensor:
        o, lse, block_mask = computed
        low, high, *tensors, block_size = resolved
        ctx.save_for_backward(q, k, v, o, lse, block_mask, *tensors)
        ctx.scalars = low, high, block_size, scale
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, block_mask, *tensors = ctx.saved_tensors
        low, high, block_size, scale = ctx.scalars
        if not (torch.is_grad_enabled() or calls_are_observed()):
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            resolved = ResolvedMask._make((low, high, *tensors, block_size))
            if direct_backward(q, k, v, *resolved, block_mask, scale, o, lse, do, dq, dk, dv):
                return dq, dk, dv, None, None, None
        problem, _ = build_problem(q, k, v, None, None, scale, None, 0.0, None, None)
        problem = replace(problem, diagonal_low=low, diagonal_high=high, block_size=block_size)
        saved = SavedForBackward(q, k, v, o, lse, block_mask)
        tensor_args = TensorArgs(None, None, None, *tensors)
        grads = first_order(_CPU, problem, do, None, saved, tensor_args, False)
        return *grads[:3], None, None, None


_apply = torch_private.apply_of(DirectAttention)
