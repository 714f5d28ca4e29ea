"""The cpu backend: blockwise online-softmax kernels without M x N memory (csrc/cpu/)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...common.torch_private import calls_are_observed
from ...problem import Problem, Saved
from ..base import FusedBackend, Gradients
from . import direct, extension


def reasons_against(device: torch.device) -> list[str]:
    """Returns the reasons why no kernel of csrc/cpu runs on the device's tensors."""
    reasons = []
    if device.type != "cpu":
        reasons.append(f"the tensors are on {device}; the cpu backend needs CPU tensors")
    unavailable = extension.unavailable_reason()
    if unavailable is not None:
        reasons.append(unavailable)
    return reasons


class CpuBackend(FusedBackend):
    """All four dtypes on any CPU. The instruction set is selected at run time."""

    name = "cpu"
    reads_packed_pages = True

    def unavailable_reason(self) -> str | None:
        return extension.unavailable_reason()

    def unsupported_reasons(self, problem: Problem) -> list[str]:
        reasons = reasons_against(problem.shape.device)
        if problem.layout.k_scale is not None and problem.scores.relative_keys is not None:
            reasons.append("relative_keys with an int8 cache: the reference backend supports them")
        return reasons

    def direct_backward(self, problem: Problem, saved: Saved, do: Tensor) -> Gradients | None:
        is_packed = problem.layout.cu_seqlens_q is not None
        if is_packed or not direct.AVAILABLE or calls_are_observed():
            return None
        return direct.backward(problem, saved, do)
