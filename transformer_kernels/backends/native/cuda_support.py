"""Which devices the compiled CUDA kernels run on, and why they do not run on others."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch

from transformer_kernels import torch_private
from transformer_kernels.backends.native import extension

Capability = tuple[int, int]
Code = Literal["binary", "PTX"]

WIDTHS: tuple[int, ...] = (
    extension.compiled.CUDA_WIDTHS if extension.unavailable_reason() is None else ()
)
"""Row widths of tiles, ascending; D and D_v are padded to the next one"""

_NOT_BUILT = "the extension is built without CUDA kernels; `make build` says why"

_emulated_by: str | None = None


def emulate(namespace: str | None) -> None:
    """Lets the backend take CPU tensors by the emulated operators of a namespace; for tests."""
    global _emulated_by
    _emulated_by = namespace


def emulated_by() -> str | None:
    """The namespace of the operators that take CPU tensors; None without an emulator."""
    return _emulated_by


def operators(device: torch.device) -> Any:
    """The namespace of the operators that run on the device."""
    if device.type == "cpu" and _emulated_by is not None:
        return getattr(torch.ops, _emulated_by)
    return torch.ops.transformer_kernels


def unavailable_reason() -> str | None:
    """Why no kernel can run on this machine; None where one can."""
    reason: str | None = reason_against(torch.device("cpu" if _emulated_by else "cuda"))
    return reason


def not_built_reason() -> str | None:
    """Why there are no kernels, whatever the device; None where they are built."""
    if (unavailable := extension.unavailable_reason()) is not None:
        return unavailable
    _, architectures = built_for()
    return None if architectures else _NOT_BUILT


def runs_hopper(device: torch.device) -> bool:
    """Whether the kernels of csrc/cuda/sm90 are built, enabled and supported by the device."""
    if device.type == "cuda" and not built_for()[1]:
        return False
    if device.type != "cuda":
        return _emulated_by is not None and bool(operators(device).runs_hopper(0))
    index = torch.cuda.current_device() if device.index is None else device.index
    return bool(operators(device).runs_hopper(index))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def reason_against(device: torch.device) -> str | None:
    """Why no kernel can run on the device; None when one can."""
    if (unavailable := extension.unavailable_reason()) is not None:
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
    built = extension.compiled.build_info()
    return built["cuda"], tuple(built["cuda_architectures"])


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
        large = _large_shared_ampere()
        fits = max(binary) not in large or capability in large
        return "binary" if fits else None
    return "PTX" if any(kind == "compute" and one <= capability for kind, one in built) else None


def _large_shared_ampere() -> set[Capability]:
    """Chips of generation 8 whose blocks may have 163 KiB of shared memory."""
    chips: set[Capability] = {divmod(chip, 10) for chip in extension.compiled.LARGE_SHARED_CHIPS}
    return {chip for chip in chips if chip[0] == 8}


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
    driver = torch_private.cuda_driver_version()
    if driver is None:
        return None  # torch does not tell; a launch raises CUDA's own error
    needed = tuple(map(int, built.split(".")))
    if driver >= needed or (code == "binary" and driver[0] == needed[0]):
        return None
    what = "the kernels are" if code == "binary" else "the kernels' PTX is"
    return f"the driver is for CUDA {driver[0]}.{driver[1]}, and {what} built by CUDA {built}"
