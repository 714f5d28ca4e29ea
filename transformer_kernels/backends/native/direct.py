"""Direct calls of the CPU kernels, past torch's dispatcher.

A registered operator costs about 10 us per call, which exceeds the time of a short attention.
csrc/bindings calls the same kernels in a few microseconds. It declines every call that is not
plainly valid, and returns the reason: the caller then runs the operator, or raises the error of
the general path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...common.torch_private import MISSING_FOR_FAST_PATH
from ...problem import Problem, Saved
from ..base import Gradients
from . import extension


def unavailable_reason() -> str | None:
    """Returns the reason why direct calls are disabled; None if they are enabled."""
    if MISSING_FOR_FAST_PATH:
        return f"torch {torch.__version__} lacks {', '.join(MISSING_FOR_FAST_PATH)}"
    if (unavailable := extension.unavailable_reason()) is not None:
        return unavailable
    if not hasattr(extension.compiled, "direct_forward"):
        return "the operators are a library without Python (building/hub.py)"
    return None


AVAILABLE = unavailable_reason() is None
"""Direct calls also need that nothing observes operators: `torch_private.calls_are_observed`."""

if AVAILABLE:
    launch_forward = extension.compiled.direct_forward
    launch_backward = extension.compiled.direct_backward


def backward(problem: Problem, saved: Saved, do: Tensor) -> Gradients | None:
    """Returns the gradients of a dense call whose lse has none; None if it is declined."""
    q, k, v, o, row_stats, block_mask = saved
    scores, mask, layout = problem.scores, problem.mask, problem.layout
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    options = scores, mask, layout, block_mask
    reason = launch_backward(q, k, v, *options, o, row_stats, do, dq, dk, dv)
    return Gradients(dq, dk, dv) if reason is None else None
