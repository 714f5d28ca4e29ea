"""The operators of linear attention, and their backends in the order in which backend="auto" tries
them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends.native import cuda_support, extension
from ..backends.native.cuda_support import LINEAR_WIDTHS
from ..backends.schema import empty_like_layout
from ..common.namespace import NAMESPACE
from ..problem.types import accumulate_dtype
from .backends import Backend, CpuBackend, KernelBackend, ReferenceBackend
from .family import Family, FamilyProblem
from .reference import reference_linear_attention
from .registration import register_compiled, register_triton
from .triton import TritonLinear
from .types import Cotangents, Gradients, Inputs, Options, Results, Saved


def _empty_results(x: Inputs, options: Options) -> Results:
    q, k, v = x.q, x.k, x.v
    dtype = accumulate_dtype(q.dtype)
    B = q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    H_kv, D, D_v = k.shape[1], k.shape[3], v.shape[3]
    return Results(
        empty_like_layout(q, D_v),
        q.new_empty(q.shape[:3] if options.normalize else (0,), dtype=dtype),
        q.new_empty((B, H_kv, D, D_v), dtype=dtype),
        q.new_empty((B, H_kv, D), dtype=dtype),
    )


LINEAR = Family(
    name="linear",
    functions=("linear_attention", "linear_attention_decode"),
    Inputs=Inputs,
    Options=Options,
    Results=Results,
    Cotangents=Cotangents,
    Gradients=Gradients,
    Saved=Saved,
    overwritten=("S", "z"),
    intermediate=("normalizer",),
    flagged=("log_decay",),
    reference=reference_linear_attention,
    empty_results=_empty_results,
    pack_options=Options.pack,
    unpack_options=Options.unpack,
)


class CudaLinear(KernelBackend):
    """csrc/cuda/linear: float16, bfloat16 and float32 on NVIDIA GPUs from Ampere on.

    Tests also run it emulated on the CPU.
    """

    name = "cuda"
    most_steps = 32  # not timed on a GPU

    def unsupported_reasons(self, problem: FamilyProblem) -> list[str]:
        return cuda_support.reasons_against(problem.shape, LINEAR_WIDTHS)

    def kernel(self, problem: FamilyProblem, q: Tensor, k: Tensor, v: Tensor) -> str:
        columns = max(problem.shape.D, problem.shape.D_v)
        width = next(width for width in LINEAR_WIDTHS if width >= columns)
        return f"csrc/cuda/linear, {str(q.dtype).removeprefix('torch.')}, width {width}"

    def operators(self, device: torch.device) -> Any:
        return cuda_support.operators(device)


_CPU = CpuBackend(LINEAR, "csrc/cpu/linear", most_steps=32)
"""At (1, 8, S, 64), float32, two cores with AVX-512, chunks take as long for 32 tokens and 0.78 of
the time for 64."""
_CUDA, _TRITON = CudaLinear(LINEAR), TritonLinear(LINEAR)
_REFERENCE = ReferenceBackend(LINEAR, "torch.matmul, chunks of 64 tokens")
LINEAR_BACKENDS: tuple[Backend, ...] = (
    (_CPU, _CUDA, _REFERENCE, _TRITON)
    if _TRITON.is_interpreted
    else (_CPU, _TRITON, _CUDA, _REFERENCE)
)
"""In bfloat16 on an H200 the Triton kernels are about twice as fast as those of csrc/cuda."""

STEP_BACKENDS: tuple[Backend, ...] = (_CPU, _CUDA, *(b for b in LINEAR_BACKENDS[1:] if b != _CUDA))
"""For `linear_attention_decode`: a step is short, and Triton launches kernels from Python."""

if extension.unavailable_reason() is None:
    register_compiled(LINEAR, NAMESPACE)
register_triton(LINEAR, f"{__package__}.triton.launch")
