"""The backends of linear attention, in the order in which backend="auto" tries them."""

from __future__ import annotations

from torch import Tensor

from .base import overwrite_state
from .compiled import CpuLinear, CudaLinear
from .reference import reference_linear_attention
from .triton import TritonLinear
from .types import Inputs, LinearProblem, Options


class ReferenceLinear:
    """Plain torch on any device, in any dtype, to any order of derivative."""

    name = "reference"

    def unsupported_reasons(self, problem: LinearProblem) -> list[str]:
        return []

    def kernel(self, problem: LinearProblem, q: Tensor, k: Tensor, v: Tensor) -> str:
        return "torch.matmul, chunks of 64 tokens"

    def steps(self, x: Inputs, options: Options) -> Tensor:
        return overwrite_state(x, *reference_linear_attention(x, options))


Backend = CpuLinear | CudaLinear | TritonLinear | ReferenceLinear

_CPU, _CUDA, _TRITON, _REFERENCE = CpuLinear(), CudaLinear(), TritonLinear(), ReferenceLinear()
LINEAR_BACKENDS: tuple[Backend, ...] = (
    (_CPU, _CUDA, _REFERENCE, _TRITON)
    if _TRITON.is_interpreted
    else (_CPU, _TRITON, _CUDA, _REFERENCE)
)
"""In bfloat16 on an H200 the Triton kernels are about twice as fast as those of csrc/cuda."""

STEP_BACKENDS: tuple[Backend, ...] = (_CPU, _CUDA, *(b for b in LINEAR_BACKENDS[1:] if b != _CUDA))
"""For `linear_attention_decode`: a step is short, and Triton launches kernels from Python."""
