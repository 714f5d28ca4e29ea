"""The compiled CUDA kernels (csrc/cuda/): sm80/ for every NVIDIA GPU from Ampere on, sm90/ for
Hopper."""

from __future__ import annotations

import functools
import os
from typing import Any, Literal

import torch
from torch import Tensor

from transformer_kernels import ops
from transformer_kernels.backends.compiled import CompiledBackend
from transformer_kernels.problem import AttentionProblem, Extras

Capability = tuple[int, int]

_NOT_BUILT = "the extension is built without CUDA kernels; `make build` says why"

WIDTHS = (32, 64, 96, 128, 192, 256)
"""Rows are filled up to one of them; kWidths in csrc/cuda/tile_config.h."""

HOPPER: Capability = (9, 0)
LARGE_AMPERE: frozenset[Capability] = frozenset({(8, 0), (8, 7)})
"""Chips of the generation 8 whose blocks may have 163 KiB of shared memory"""
HOPPER_CODE = "sm_90a"
"""What build_info() has where csrc/cuda/sm90 is built"""
HOPPER_SWITCH = "TRANSFORMER_KERNELS_HOPPER"
"""An environment variable: 0 leaves all to sm80/, to compare or to go round a fault"""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""As csrc/params.h counts them"""


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

    def kernel(
        self, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, extras: Extras
    ) -> str:
        dtype, where = str(problem.dtype).removeprefix("torch."), _where(problem.device)
        if has_hopper_kernels(problem.device):
            (width, v_width), backward = _hopper_widths(problem, q, k, v, extras)
            if width:
                bias_needs_grad = extras.bias is not None and extras.bias.requires_grad
                files = "sm90"
                if backward != (width, v_width):
                    files += " forward, csrc/cuda/sm80 backward"
                elif bias_needs_grad:
                    files += ", csrc/cuda/sm80 for dbias"
                return f"csrc/cuda/{files}, {dtype}, width {width}/{v_width}, {where}"
        width = next(width for width in WIDTHS if width >= max(problem.D, problem.D_v))
        return f"csrc/cuda/sm80, {dtype}, width {width}, {where}"


_emulated_by: str | None = None


def emulate(namespace: str | None) -> None:
    """From now on the backend takes CPU tensors, by these operators; for testing/emulator.py."""
    global _emulated_by
    _emulated_by = namespace


def emulated_by() -> str | None:
    """The namespace of the operators that take CPU tensors; None if none do."""
    return _emulated_by


def has_hopper_kernels(device: torch.device) -> bool:
    """Whether csrc/cuda/sm90 runs there what it takes."""
    if device.type == "cuda":
        _, architectures = built_for()
        built = HOPPER_CODE in architectures and os.environ.get(HOPPER_SWITCH) != "0"
        return built and torch.cuda.get_device_capability(device) == HOPPER
    runs_hopper = None if _emulated_by is None else getattr(torch.ops, _emulated_by).runs_hopper
    return runs_hopper is not None and bool(runs_hopper())


def _hopper_widths(
    problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, extras: Extras
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of tiles of q and k, and of v; (0, 0) where csrc/cuda/sm90 does not take the pass."""
    from transformer_kernels import _C

    p = problem
    sizes = (p.B, p.H_q, p.H_kv, p.M, p.N, p.D, p.D_v)
    results = (_new_rows(q, p.D_v), _new_rows(k, p.D), _new_rows(v, p.D_v))
    rows = (_rows(q), _rows(k), _rows(v), *results)
    return _C.hopper_widths(_DTYPES.index(p.dtype), sizes, *rows)


def _new_rows(like: Tensor, width: int) -> tuple[int, tuple[int, ...]]:
    """Those of a result, which lies as its input."""
    x = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return 0, ops.empty_like_layout(x, width).stride()


def _rows(x: Tensor) -> tuple[int, tuple[int, ...]]:
    """Address and strides of what kernels read: a copy, where elements do not lie side by side."""
    if x.stride(3) == 1 or x.shape[3] == 1:
        return x.data_ptr(), x.stride()
    return 0, torch.empty(x.shape, device="meta").stride()


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
    return _reason_against_chip(capability, architectures) or _reason_against_driver(
        version, _code_for(capability, architectures)
    )


@functools.cache
def built_for() -> tuple[str, tuple[str, ...]]:
    """The version of CUDA, and sm_80, ..., compute_86; empty where no kernels are built."""
    from transformer_kernels import _C

    built = _C.build_info()
    return built["cuda"], tuple(built["cuda_architectures"])


Code = Literal["binary", "PTX"]


def _code_for(capability: Capability, architectures: tuple[str, ...]) -> Code | None:
    """What the driver takes for a chip; None where nothing of what is built runs on it.

    Binary code runs on chips of its generation that are not older, PTX on all that are not. Code
    for sm_90a comes beside that for sm_90, and has some kernels only. The driver takes the latest
    binary code that runs: if that is for 8.0 or 8.7, its tiles need 163 KiB of shared memory, where
    other chips of the generation have 99.
    """
    built = [
        (kind, (int(number[:-1]), int(number[-1])))
        for kind, _, number in (name.partition("_") for name in architectures)
        if number.isdecimal()
    ]
    major = capability[0]
    binary = [one for kind, one in built if kind == "sm" and (major, 0) <= one <= capability]
    if binary:
        fits = max(binary) not in LARGE_AMPERE or capability in LARGE_AMPERE
        return "binary" if fits else None
    return "PTX" if any(kind == "compute" and one <= capability for kind, one in built) else None


def _reason_against_chip(capability: Capability, architectures: tuple[str, ...]) -> str | None:
    major, minor = capability
    if capability < (8, 0):
        return f"the GPU is sm_{major}{minor}; these kernels need sm_80 or later"
    if _code_for(capability, architectures) is not None:
        return None
    return (
        f"the GPU is sm_{major}{minor}, and the kernels are built for {', '.join(architectures)}: "
        f"build again with TORCH_CUDA_ARCH_LIST={major}.{minor}"
    )


def _reason_against_driver(built: str, code: Code | None) -> str | None:
    """Binary code of a later CUDA runs under drivers of the same major version; its PTX must be
    compiled by the driver, and under an earlier one cannot."""
    version: int = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    driver = (version // 1000, version % 1000 // 10)
    needed = tuple(map(int, built.split(".")))
    if driver >= needed or (code == "binary" and driver[0] == needed[0]):
        return None
    what = "the kernels are" if code == "binary" else "the kernels' PTX is"
    return f"the driver is for CUDA {driver[0]}.{driver[1]}, and {what} built by CUDA {built}"


def _where(device: torch.device) -> str:
    if device.type != "cuda":
        return "emulated"
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
