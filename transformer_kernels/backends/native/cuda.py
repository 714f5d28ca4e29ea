"""The cuda backend: csrc/cuda/sm80 for NVIDIA GPUs from Ampere on, csrc/cuda/sm90 for Hopper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...problem import Problem, Shape
from ...scores.options import DIFFERENTIABLE
from .. import schema
from ..base import FusedBackend
from . import cuda_support, extension
from .cuda_support import RELATIVE_WIDTHS, WIDTHS

HOPPER_SWITCH = "TRANSFORMER_KERNELS_HOPPER"
"""Environment variable read by csrc/cuda/sm90. 0 disables the Hopper kernels: everything runs on
the sm80 kernels, for comparison or as a workaround."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""In the order of tk::DType in csrc/common/params.h."""


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
                "relative_keys with a cache: the cpu and reference backends support them"
            )
        return reasons

    def kernel(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> str:
        shape, kind = problem.shape, problem.layout.kind
        dtype, where = str(shape.dtype).removeprefix("torch."), cuda_support.described(shape.device)
        is_relative = problem.scores.relative_keys is not None
        widths = RELATIVE_WIDTHS if is_relative else WIDTHS
        width = str(next(width for width in widths if width >= max(shape.D, shape.D_v)))
        files = "sm80/decode" if kind == "cache" else "sm80/relative" if is_relative else "sm80"
        if cuda_support.runs_hopper(shape.device) and kind != "cache" and not is_relative:
            forward, backward = _hopper_widths(shape, q, k, v)
            if forward[0]:
                files, width = "sm90", f"{forward[0]}/{forward[1]}"
                if backward != forward:
                    files += " forward, csrc/cuda/sm80 backward"
                elif options := _options_that_require_grad(problem):
                    files += ", csrc/cuda/sm80 for " + " and ".join(f"d{x}" for x in options)
        if _decodes(problem):
            files = f"sm80/decode forward, csrc/cuda/{files} backward"
        return f"csrc/cuda/{files}, {dtype}, width {width}, {where}"


def _decodes(problem: Problem) -> bool:
    """True if the decode kernels run a call without a cache: `runs_decode` in dispatch.cu."""
    shape, scores = problem.shape, problem.scores
    return (
        problem.layout.kind == "dense"
        and extension.compiled.decodes(shape.B, shape.H_q, shape.H_kv, shape.M, shape.N)
        and scores.dropout_p == 0.0
        and scores.bias is None
        and scores.relative_keys is None
        and not problem.mask.has_element_mask
    )


def _options_that_require_grad(problem: Problem) -> list[str]:
    options = {name: getattr(problem.scores, name) for name in DIFFERENTIABLE}
    return [name for name, x in options.items() if x is not None and x.requires_grad]


def _hopper_widths(
    shape: Shape, q: Tensor, k: Tensor, v: Tensor
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the tile widths (q and k, v) of both passes; (0, 0) if sm90 does not support one."""
    sizes = (*q.shape[:2], *k.shape[1:2], q.shape[2], k.shape[2], shape.D, shape.D_v)
    outputs = (_output_rows(q, shape.D_v), _output_rows(k, shape.D), _output_rows(v, shape.D_v))
    rows = (_rows(q), _rows(k), _rows(v), *outputs)
    return extension.compiled.hopper_widths(_DTYPES.index(shape.dtype), sizes, *rows)


def _output_rows(like: Tensor, width: int) -> tuple[int, tuple[int, ...]]:
    """Address (0) and strides of an output, which has the memory order of its input."""
    x = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return 0, schema.empty_like_layout(x, width).stride()


def _rows(x: Tensor) -> tuple[int, tuple[int, ...]]:
    """Address and strides that kernels read; those of a copy if the last stride is not 1."""
    if x.stride(3) == 1 or x.shape[3] == 1:
        return x.data_ptr(), x.stride()
    return 0, torch.empty(x.shape, device="meta").stride()
