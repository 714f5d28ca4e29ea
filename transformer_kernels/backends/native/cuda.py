"""The cuda backend: csrc/cuda/sm80 for NVIDIA GPUs from Ampere on, csrc/cuda/sm90 for Hopper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...common.torch_private import MISSING_FOR_FAST_PATH, operators_are_observed
from ...problem import Problem, Saved
from ...problem.layout import DENSE
from ..base import FusedBackend, Gradients, Outputs
from . import cuda_support
from .cuda_support import WIDTHS

HOPPER_SWITCH = "TRANSFORMER_KERNELS_HOPPER"
"""Environment variable read by csrc/cuda/sm90. 0 disables the Hopper kernels: everything runs on
the sm80 kernels, for comparison or as a workaround."""


class CudaBackend(FusedBackend):
    """float16, bfloat16 and float32 on NVIDIA GPUs. Tests also run it emulated on the CPU."""

    name = "cuda"

    def operators(self, device: torch.device) -> Any:
        return cuda_support.operators(device)

    def unavailable_reason(self) -> str | None:
        return cuda_support.unavailable_reason()

    def unsupported_reasons(self, problem: Problem) -> list[str]:
        reasons = cuda_support.reasons_against(problem.shape, WIDTHS)
        if problem.scores.relative_keys is not None and problem.layout.kind == "cache":
            reasons.append(
                "relative_keys with a cache: the cpu, triton and reference backends support them"
            )
        if problem.layout.k_scale is not None:
            reasons.append("int8 caches: the cpu, triton and reference backends support them")
        if problem.mask.selected is not None:
            reasons.append("Mask.selected: the cpu, triton and reference backends support it")
        return reasons

    def direct_backward(self, problem: Problem, saved: Saved, do: Tensor) -> Gradients | None:
        if problem.layout is not DENSE or (direct := _direct_calls(do.device)) is None:
            return None
        q, k, v, o, row_stats, _ = saved
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        options = problem.scores, problem.mask, problem.layout
        deterministic = torch.are_deterministic_algorithms_enabled()
        reason = direct[1](q, k, v, *options, o, row_stats, do, dq, dk, dv, deterministic)
        return Gradients(dq, dk, dv) if reason is None else None


def _direct_calls(device: torch.device) -> cuda_support.DirectCalls | None:
    """Returns the direct calls; None if there are none, or something may intercept an operator."""
    direct = cuda_support.libraries[device.type].direct
    return None if direct is None or MISSING_FOR_FAST_PATH or operators_are_observed() else direct


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Outputs | None:
    """Runs a dense problem past torch's dispatcher, which takes longer than to launch the kernels.

    Returns None if the call is declined: the operator then runs it.
    """
    if (direct := _direct_calls(q.device)) is None:
        return None
    o = torch.empty_like(q)
    row_stats = torch.empty(2, *q.shape[:3], dtype=torch.float32, device=q.device)
    scores, mask, layout = problem.scores, problem.mask, problem.layout
    reason = direct[0](q, k, v, scores, mask, layout, o, row_stats)
    return Outputs(o, row_stats, None) if reason is None else None
