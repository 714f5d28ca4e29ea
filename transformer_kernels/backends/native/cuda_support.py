"""Device support of the compiled CUDA kernels: build, GPU and driver checks, with reasons."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Literal

import torch

from ...common.namespace import NAMESPACE
from ...common.torch_private import constant_in_compiled_code
from ...problem import Shape
from . import extension

Capability = tuple[int, int]
Code = Literal["binary", "PTX"]

WIDTHS: tuple[int, ...] = (
    extension.compiled.CUDA_WIDTHS if extension.unavailable_reason() is None else ()
)
"""Tile widths, ascending; D and D_v are padded to the next one."""

LINEAR_WIDTHS: tuple[int, ...] = extension.compiled.CUDA_LINEAR_WIDTHS if WIDTHS else ()
"""Those of the kernels of linear attention."""

_DRIVER = "libcuda.so.1"

_NOT_BUILT = "the extension is built without CUDA kernels; `make build` prints the reason"


DirectCalls = tuple[Callable[..., str | None], Callable[..., str | None]]
"""Functions that call the forward and the backward kernels past torch's dispatcher:
csrc/bindings/cuda_fast_path.cpp. Each returns the reason if it declines a call."""


class Library:
    """A library of the CUDA kernels, for the devices that have them."""

    def __init__(self, namespace: str, direct: DirectCalls | None = None) -> None:
        self.namespace = namespace
        self._own_direct = direct
        self.use(namespace)

    def use(self, namespace: str) -> None:
        """Runs the operators of a namespace from now on: its own, or those of another build, which
        has no direct calls."""
        self.operators = getattr(torch.ops, namespace)
        self.direct = self._own_direct if namespace == self.namespace else None

    def reason_against(self, device: torch.device) -> str | None:
        """Returns the reason why the kernels cannot run on the device; None if they can."""
        # A device without an index is the current one, which may change.
        return _cuda_device_reason(device) if device.index is None else _known_reason(device)


_direct = getattr(extension.compiled, "cuda_functions", None) if WIDTHS else None
libraries = {"cuda": Library(NAMESPACE, _direct)}
"""By the type of the devices. Measurements and tests replace them; a backward pass runs the
operators of the library in use when it starts."""


def operators(device: torch.device) -> Any:
    """Returns the operator namespace that runs on the device."""
    return libraries[device.type].operators


def unavailable_reason() -> str | None:
    """Returns the reason why no kernel can run on this machine; None if one can."""
    reasons = [unsupported_device_reason(torch.device(kind)) for kind in libraries]
    return None if None in reasons else reasons[0]


def not_built_reason() -> str | None:
    """Returns the reason why no CUDA kernels are built; None if they are."""
    if (unavailable := extension.unavailable_reason()) is not None:
        return unavailable
    _, architectures = built_for()
    return None if architectures else _NOT_BUILT


def runs_hopper(device: torch.device) -> bool:
    """True if the kernels of csrc/cuda/sm90 are built, enabled and supported by the CUDA device."""
    if not built_for()[1]:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return bool(operators(device).runs_hopper(index))


@constant_in_compiled_code
def unsupported_device_reason(device: torch.device) -> str | None:
    """Returns the reason why no kernel can run on the device; None if one can."""
    if (unavailable := extension.unavailable_reason()) is not None:
        return unavailable
    library = libraries.get(device.type)
    if library is None:
        return f"the tensors are on {device}; the cuda backend needs CUDA tensors"
    return library.reason_against(device)


@functools.cache
def _known_reason(device: torch.device) -> str | None:
    """`_cuda_device_reason` of a device with an index. Every call of an operator asks for it."""
    return _cuda_device_reason(device)


def _cuda_device_reason(device: torch.device) -> str | None:
    version, architectures = built_for()
    if not architectures:
        return _NOT_BUILT
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    if torch.version.hip is not None:
        return "the cuda backend needs an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    return _unsupported_gpu_reason(capability, architectures) or _unsupported_driver_reason(
        version, _code_for(capability, architectures)
    )


def reasons_against(shape: Shape, widths: tuple[int, ...]) -> list[str]:
    """Returns the reasons why kernels with these tile widths support no call of this shape."""
    unavailable = unsupported_device_reason(shape.device)
    reasons = [] if unavailable is None else [unavailable]
    if shape.dtype == torch.float64:
        reasons.append("float64: these kernels compute in float32")
    columns = max(shape.D, shape.D_v)
    if widths and columns > widths[-1]:
        reasons.append(f"rows of {columns} elements: tiles are up to {widths[-1]} wide")
    return reasons


@functools.cache
def built_for() -> tuple[str, tuple[str, ...]]:
    """Returns the CUDA version and the architectures (sm_80, ...); empty if nothing is built."""
    built = extension.compiled.build_info()
    return built["cuda"], tuple(built["cuda_architectures"])


@functools.cache
def _code_for(capability: Capability, architectures: tuple[str, ...]) -> Code | None:
    """Returns the kind of code that the driver loads for a GPU; None if no built code runs on it.

    Binary code runs on GPUs of the same major compute capability and the same or a later minor one;
    PTX runs on the same and all later capabilities. sm_90a code accompanies sm_90 code and contains
    only some kernels. The driver loads the latest binary code that runs. Tiles compiled for 8.0 or
    8.7 need 163 KiB of shared memory per CTA; other GPUs of major version 8 have 99 KiB.
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


@functools.cache
def _large_shared_ampere() -> set[Capability]:
    """Compute capabilities 8.x with 163 KiB of shared memory per CTA."""
    chips: set[Capability] = {divmod(chip, 10) for chip in extension.compiled.LARGE_SHARED_CHIPS}
    return {chip for chip in chips if chip[0] == 8}


def _unsupported_gpu_reason(capability: Capability, architectures: tuple[str, ...]) -> str | None:
    major, minor = capability
    if capability < (8, 0):
        return f"the GPU is sm_{major}{minor}; the cuda backend needs sm_80 or later"
    if _code_for(capability, architectures) is not None:
        return None
    return (
        f"the GPU is sm_{major}{minor}, and the kernels are built for {', '.join(architectures)}: "
        f"rebuild with TORCH_CUDA_ARCH_LIST={major}.{minor}"
    )


def _unsupported_driver_reason(built: str, code: Code | None) -> str | None:
    """Binary code runs on drivers of the same CUDA major version, even if they are older. PTX is
    compiled by the driver, which must not be older than the toolkit."""
    driver = cuda_driver_version()
    if driver is None:
        return None  # unknown; a launch raises CUDA's own error
    needed = tuple(map(int, built.split(".")))
    if driver >= needed or (code == "binary" and driver[0] == needed[0]):
        return None
    what = "the kernels are" if code == "binary" else "the kernels' PTX is"
    return f"the driver is for CUDA {driver[0]}.{driver[1]}, and {what} built by CUDA {built}"


def cuda_driver_version() -> tuple[int, int] | None:
    """Returns the CUDA version that the driver supports, such as (13, 0); None without a driver.

    The driver itself is asked: torch has no public function.
    """
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10
