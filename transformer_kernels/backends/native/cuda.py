"""The cuda backend: csrc/cuda/sm80 for NVIDIA GPUs from Ampere on, csrc/cuda/sm90 for Hopper."""

from __future__ import annotations

from typing import Any

import torch

from ...problem import Problem
from ..base import FusedBackend
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
