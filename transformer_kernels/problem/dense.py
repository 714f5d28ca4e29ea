"""Validation of `attention` calls, before any kernel is launched."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from ..masks.constraints import Align
from ..masks.mask import Mask
from ..masks.resolved import ALL_VISIBLE, ResolvedMask, resolve
from ..scores.alibi import Alibi
from ..scores.options import ScoreArguments, check_scores
from ..scores.sinks import check_sinks
from .checks import check_mask_tensors, check_tensors
from .types import Problem, shape_of


def dense_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    sinks: Tensor | None = None,
    **scores: Unpack[ScoreArguments],
) -> Problem:
    """Validates a call of `attention`; errors name the argument, its value and what is expected."""
    check_tensors(q, k, v)
    shape = shape_of(q, k, v)
    bias = scores.get("bias")
    align: Align = bias.align if isinstance(bias, Alibi) else "top_left"
    resolved = _resolve(mask, shape.B, shape.H_q, shape.M, shape.N, align, q.device)
    options = check_scores(q, shape.M, shape.N, bottom_right=resolved.bottom_right, **scores)
    check_sinks(sinks, q)
    return Problem(shape, resolved, options)


def _resolve(
    mask: Mask | None, B: int, H: int, M: int, N: int, align: Align, device: torch.device
) -> ResolvedMask:
    if mask is None:
        # Compiled code would take the numbers of a global object as inputs, not as constants.
        is_plain = align == "top_left" and not torch.compiler.is_compiling()
        return ALL_VISIBLE if is_plain else ResolvedMask(bottom_right=align == "bottom_right")
    if not isinstance(mask, Mask):
        raise TypeError(
            f"mask must be a Mask or None, got {type(mask).__name__}; "
            "wrap a bool tensor as Mask.dense(tensor)"
        )
    check_mask_tensors(mask, device)
    return resolve(mask, B, H, M, N, align)
