"""The cuda backend of linear attention: operators of the compiled extension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends.native import cuda_support
from ..backends.native.cuda_support import LINEAR_WIDTHS
from .base import LinearBackend
from .types import LinearProblem


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
