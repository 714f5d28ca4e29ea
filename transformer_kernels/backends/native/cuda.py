"""The cuda backend: csrc/cuda/sm80 for NVIDIA GPUs from Ampere on, csrc/cuda/sm90 for Hopper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends import schema
from transformer_kernels.backends.native import cuda_support, extension
from transformer_kernels.backends.native.base import NativeBackend
from transformer_kernels.backends.native.cuda_support import WIDTHS
from transformer_kernels.problem import AttentionProblem, TensorArgs

HOPPER_SWITCH = "TRANSFORMER_KERNELS_HOPPER"
"""Environment variable read by csrc/cuda/sm90. 0 disables the Hopper kernels: everything runs on
the sm80 kernels, for comparison or as a workaround."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""In the order of tk::DType in csrc/common/params.h."""


class CudaBackend(NativeBackend):
    """float16, bfloat16 and float32 on NVIDIA GPUs. Tests also run it emulated on the CPU."""

    name = "cuda"

    def operators(self, device: torch.device) -> Any:
        return cuda_support.operators(device)

    def unavailable_reason(self) -> str | None:
        return cuda_support.unavailable_reason()

    def unsupported_reasons(self, problem: AttentionProblem) -> list[str]:
        reasons = []
        unavailable = cuda_support.unsupported_device_reason(problem.device)
        if unavailable is not None:
            reasons.append(unavailable)
        if problem.dtype == torch.float64:
            reasons.append("float64: these kernels compute in float32")
        columns = max(problem.D, problem.D_v)
        if WIDTHS and columns > WIDTHS[-1]:
            reasons.append(f"rows of {columns} elements: tiles are up to {WIDTHS[-1]} wide")
        if problem.alibi_slopes_need_grad:
            reasons.append("ALiBi slopes that require grad: only plain torch differentiates them")
        return reasons

    def kernel(
        self, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, tensor_args: TensorArgs
    ) -> str:
        dtype, where = str(problem.dtype).removeprefix("torch."), _where(problem.device)
        if cuda_support.runs_hopper(problem.device):
            (width, v_width), backward = _hopper_widths(problem, q, k, v, tensor_args)
            if width:
                bias_needs_grad = tensor_args.bias is not None and tensor_args.bias.requires_grad
                files = "sm90"
                if backward != (width, v_width):
                    files += " forward, csrc/cuda/sm80 backward"
                elif bias_needs_grad:
                    files += ", csrc/cuda/sm80 for dbias"
                return f"csrc/cuda/{files}, {dtype}, width {width}/{v_width}, {where}"
        columns = max(problem.D, problem.D_v)
        width = next(width for width in WIDTHS if width >= columns)
        return f"csrc/cuda/sm80, {dtype}, width {width}, {where}"


def _hopper_widths(
    problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, tensor_args: TensorArgs
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the tile widths (q and k, v) of both passes; (0, 0) if sm90 does not support one."""
    p = problem
    sizes = (p.B, p.H_q, p.H_kv, p.M, p.N, p.D, p.D_v)
    outputs = (_output_rows(q, p.D_v), _output_rows(k, p.D), _output_rows(v, p.D_v))
    rows = (_rows(q), _rows(k), _rows(v), *outputs)
    return extension.compiled.hopper_widths(_DTYPES.index(p.dtype), sizes, *rows)


def _output_rows(like: Tensor, width: int) -> tuple[int, tuple[int, ...]]:
    """Address (0) and strides of an output, which has the memory order of its input."""
    x = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return 0, schema.empty_like_layout(x, width).stride()


def _rows(x: Tensor) -> tuple[int, tuple[int, ...]]:
    """Address and strides that kernels read; those of a copy if the last stride is not 1."""
    if x.stride(3) == 1 or x.shape[3] == 1:
        return x.data_ptr(), x.stride()
    return 0, torch.empty(x.shape, device="meta").stride()


def _where(device: torch.device) -> str:
    if device.type != "cuda":
        return "emulated"
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
