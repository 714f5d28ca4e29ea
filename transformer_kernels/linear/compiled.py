"""The cpu and cuda backends of linear attention: operators of the compiled extension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends.native import cuda_support, extension
from ..backends.native.cpu import reasons_against
from ..backends.native.cuda_support import LINEAR_WIDTHS
from .base import LinearBackend
from .types import LinearProblem


class CpuLinear(LinearBackend):
    """csrc/cpu/linear: all four dtypes on any CPU."""

    name = "cpu"
    most_steps = 32
    """At (1, 8, S, 64), float32, two cores with AVX-512, chunks take as long for 32 tokens and 0.78
    of the time for 64."""

    def unsupported_reasons(self, problem: LinearProblem) -> list[str]:
        return reasons_against(problem.shape.device)

    def kernel(self, problem: LinearProblem, q: Tensor, k: Tensor, v: Tensor) -> str:
        computing = str(problem.shape.accumulate_dtype).removeprefix("torch.")
        return f"csrc/cpu/linear, {extension.compiled.isa()}, computing in {computing}"


class CudaLinear(LinearBackend):
    """csrc/cuda/linear: float16, bfloat16 and float32 on NVIDIA GPUs from Ampere on.

    Tests also run it emulated on the CPU.
    """

    name = "cuda"
    most_steps = 32  # not timed on a GPU

    def unsupported_reasons(self, problem: LinearProblem) -> list[str]:
        return cuda_support.reasons_against(problem.shape, LINEAR_WIDTHS)

    def kernel(self, problem: LinearProblem, q: Tensor, k: Tensor, v: Tensor) -> str:
        columns = max(problem.shape.D, problem.shape.D_v)
        width = next(width for width in LINEAR_WIDTHS if width >= columns)
        return f"csrc/cuda/linear, {str(q.dtype).removeprefix('torch.')}, width {width}"

    def operators(self, device: torch.device) -> Any:
        return cuda_support.operators(device)
