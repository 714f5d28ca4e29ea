"""Fast path of a plain call. GPUs have their own, `cuda_path`.

On a CPU it has no checks, no objects and no torch dispatcher, which cost more than the kernel of a
short attention. A call that is not plainly valid is declined; the general path then runs it or
raises its error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..backends import CpuBackend
from ..backends.base import Outputs
from ..backends.native import cuda_support, direct
from ..masks.constraints import KeyRange, Window
from ..masks.mask import Mask
from ..masks.resolved import ALL_VISIBLE, ResolvedMask, resolve
from ..problem import Layout, Problem, shape_of
from ..problem.cache import resolve_cache_mask
from ..problem.layout import DENSE
from ..scores.options import PLAIN_SCORES, ScoreOptions
from . import cuda_path, division
from .autograd import attach

_CPU = CpuBackend()
_PLAIN_TYPES = frozenset((Tensor, Parameter))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    scale: Any,
    grouped: bool = True,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor | None:
    """Returns o, differentiable to any order; None if the call needs the general path.

    A plain call has tensors of no subclass and any mask; on a CPU D = D_v and no dropout. `grouped`
    is True if k and v may have fewer heads than q. A scale that is neither a float nor None, such
    as a tensor, is declined.
    """
    if not (type(q) in _PLAIN_TYPES and type(k) in _PLAIN_TYPES and type(v) in _PLAIN_TYPES):
        return None
    if division.current is not None:
        return None
    if backend != "cpu" and (q.is_cuda or (backend == "cuda" and cuda_support.emulated_by())):
        return cuda_path.attend(q, k, v, mask, scale, grouped, dropout_p)
    if backend == "cuda" or dropout_p != 0.0:
        return None
    resolved = _resolve(mask, q, k) if q.is_cpu and direct.is_allowed() else None
    if resolved is None:
        return None
    scores = PLAIN_SCORES if scale is None else ScoreOptions(scale)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    problem = row_stats = None
    try:
        o, block_mask = torch.empty_like(q), _empty_block_mask(resolved, q, k)
        if needs_grad:
            shape = shape_of(q, k, v)
            problem = Problem(shape, resolved, scores)
            row_stats = torch.empty(2, shape.B, shape.H_q, shape.M, dtype=shape.accumulate_dtype)
    except (RuntimeError, TypeError, ValueError):  # unchecked; the general path names what is wrong
        return None
    options = scores, resolved, DENSE, block_mask, grouped
    if not direct.launch_forward(q, k, v, *options, o, row_stats):
        return None
    if problem is None or row_stats is None:
        return o
    result: Tensor = attach(_CPU, problem, Outputs(o, row_stats, block_mask), q, k, v)
    return result


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    mask: Mask | None,
    scale: Any,
) -> Tensor | None:
    """Returns o of an `attention_decode` call; None if the call needs the general path."""
    if division.current is not None or not direct.is_allowed():
        return None
    if not (
        type(q) in _PLAIN_TYPES
        and type(k_cache) in _PLAIN_TYPES
        and type(v_cache) in _PLAIN_TYPES
        and type(cache_seqlens) is Tensor
        and (block_table is None or type(block_table) is Tensor)
    ):
        return None
    resolved = _resolve_cache_mask(mask) if q.is_cpu else None
    if resolved is None:
        return None
    if torch.is_grad_enabled() and (
        q.requires_grad or k_cache.requires_grad or v_cache.requires_grad
    ):
        return None
    try:
        o = torch.empty_like(q)
    except RuntimeError:
        return None
    scores = PLAIN_SCORES if scale is None else ScoreOptions(scale)
    layout = Layout(cache_seqlens=cache_seqlens, block_table=block_table)
    ran = direct.launch_forward(q, k_cache, v_cache, scores, resolved, layout, None, True, o, None)
    return o if ran else None


def _resolve(mask: Mask | None, q: Tensor, k: Tensor) -> ResolvedMask | None:
    """Resolves the mask; None if it does not fit the sizes or is on another device."""
    if mask is None:
        return ALL_VISIBLE
    if type(mask) is not Mask:
        return None
    try:
        B, H, M, _ = q.shape
        _, _, N, _ = k.shape
        return resolve(mask, B, H, M, N)
    except (ValueError, RuntimeError):
        return None


def _resolve_cache_mask(mask: Mask | None) -> ResolvedMask | None:
    """Resolves bottom-right aligned windows and key ranges; None for any other mask."""
    is_plain = mask is None or (
        type(mask) is Mask
        and all(
            type(one) is KeyRange or (type(one) is Window and one.align == "bottom_right")
            for one in mask.constraints
        )
    )
    if not is_plain:
        return None
    try:
        return resolve_cache_mask(mask)
    except (ValueError, RuntimeError):  # unchecked: key ranges that do not fit each other
        return None


def _empty_block_mask(resolved: ResolvedMask, q: Tensor, k: Tensor) -> Tensor | None:
    """Allocates the block mask; None if the mask needs none."""
    if not resolved.has_element_mask:
        return None
    return torch.empty(resolved.block_mask_shape(q.shape[2], k.shape[2]), dtype=torch.uint8)
