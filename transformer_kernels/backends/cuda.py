"""The compiled CUDA kernels (csrc/cuda/): sm80/ for every NVIDIA GPU from Ampere on."""

from __future__ import annotations

import functools
from typing import Any

import torch

from transformer_kernels import ops
from transformer_kernels.backends.compiled import CompiledBackend
from transformer_kernels.problem import AttentionProblem

Capability = tuple[int, int]

_NOT_BUILT = "the extension is built without CUDA kernels; `make build` says why"

WIDTHS = (32, 64, 96, 128, 192, 256)
"""Rows are filled up to one of them; kWidths in csrc/cuda/tile_config.h."""


class CudaBackend(CompiledBackend):
    """float16, bfloat16 and float32 on NVIDIA GPUs; in tests on the CPU, emulated."""

    name = "cuda"

    def operators(self, device: torch.device) -> Any:
        if device.type == "cpu" and _emulated_by is not None:
            return getattr(torch.ops, _emulated_by)
        return torch.ops.transformer_kernels

    def why_unavailable(self) -> str | None:
        unavailable: str | None = _reason_against(torch.device("cpu" if _emulated_by else "cuda"))
        return unavailable

    @staticmethod
    def why_not_built() -> str | None:
        """The reason if there are no kernels, whatever the device."""
        if (unavailable := ops.why_unavailable()) is not None:
            return unavailable
        _, architectures = built_for()
        return None if architectures else _NOT_BUILT

    def unsupported_reasons(self, problem: AttentionProblem) -> list[str]:
        reasons = []
        unavailable = _reason_against(problem.device)
        if unavailable is not None:
            reasons.append(unavailable)
        if problem.dtype == torch.float64:
            reasons.append("float64: these kernels compute in float32")
        columns = max(problem.D, problem.D_v)
        if columns > WIDTHS[-1]:
            reasons.append(f"rows of {columns} elements: tiles are up to {WIDTHS[-1]} wide")
        if problem.alibi_slopes_need_grad:
            reasons.append("ALiBi slopes that require grad: only plain torch differentiates them")
        return reasons

    def kernel(self, problem: AttentionProblem) -> str:
        width = next(width for width in WIDTHS if width >= max(problem.D, problem.D_v))
        dtype = str(problem.dtype).removeprefix("torch.")
        return f"csrc/cuda/sm80, {dtype}, width {width}, {_where(problem.device)}"


_emulated_by: str | None = None


def emulate(namespace: str | None) -> None:
    """From now on the backend takes CPU tensors, by these operators; for testing/emulator.py."""
    global _emulated_by
    _emulated_by = namespace


def emulated_by() -> str | None:
    """The namespace of the operators that take CPU tensors; None if none do."""
    return _emulated_by


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _reason_against(device: torch.device) -> str | None:
    """Why no kernel can run on the device; None when one can."""
    if (unavailable := ops.why_unavailable()) is not None:
        return unavailable
    if device.type == "cpu" and _emulated_by:
        return None
    if device.type != "cuda":
        return f"tensors are on {device}, these kernels run on a CUDA device"
    version, architectures = built_for()
    if not architectures:
        return _NOT_BUILT
    if not torch.cuda.is_available():
        return "there is no GPU here"
    if torch.version.hip is not None:
        return "these kernels are for NVIDIA's GPUs"
    capability = torch.cuda.get_device_capability(device)
    return _reason_against_driver(version) or _reason_against_chip(capability, architectures)


@functools.cache
def built_for() -> tuple[str, tuple[str, ...]]:
    """The version of CUDA, and sm_80, ..., compute_86; empty where no kernels are built."""
    from transformer_kernels import _C

    built = _C.build_info()
    return built["cuda"], tuple(built["cuda_architectures"])


def _reason_against_driver(built: str) -> str | None:
    """Code of a later CUDA does not run under a driver of an earlier one."""
    driver: int = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    if driver // 1000 >= int(built.partition(".")[0]):
        return None
    return (
        f"the driver is for CUDA {driver // 1000}.{driver % 1000 // 10}, and the kernels are built "
        f"by CUDA {built}"
    )


def _reason_against_chip(capability: Capability, architectures: tuple[str, ...]) -> str | None:
    """Binary code runs on chips of its generation that are not older, PTX on all that are not."""
    major, minor = capability
    if capability < (8, 0):
        return f"the GPU is sm_{major}{minor}; these kernels need sm_80 or later"
    for name in architectures:
        kind, _, number = name.partition("_")
        built = (int(number[:-1]), int(number[-1]))
        if built <= capability and (kind == "compute" or built[0] == major):
            return None
    return (
        f"the GPU is sm_{major}{minor}, and the kernels are built for {', '.join(architectures)}: "
        f"build again with TORCH_CUDA_ARCH_LIST={major}.{minor}"
    )


def _where(device: torch.device) -> str:
    if device.type != "cuda":
        return "emulated"
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
