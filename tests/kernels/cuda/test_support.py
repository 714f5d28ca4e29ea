"""Supported problems, GPUs and drivers of the cuda backend, and its reasons against the others."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import transformer_kernels as tk
from building.tile_config import LARGE_SHARED, LINEAR_WIDTHS, WIDTHS
from tests.support.tiers import each
from transformer_kernels import _C
from transformer_kernels.backends import CudaBackend
from transformer_kernels.backends.native import cuda_support, extension
from transformer_kernels.backends.native.cuda_support import (
    _known_reason,
    _unsupported_gpu_reason,
    built_for,
    cuda_driver_version,
    unsupported_device_reason,
)
from transformer_kernels.problem import Problem, Shape

BACKEND = CudaBackend()
ON_GPU = torch.device("cuda")
H100 = (9, 0)
BUILT = ("sm_80", "sm_86", "sm_90", "compute_86")
WITH_HOPPER = ("sm_80", "sm_86", "sm_90", "sm_90a", "compute_86")


def problem(D: int = 64, D_v: int = 64, dtype: torch.dtype = torch.bfloat16) -> Problem:
    return Problem(Shape(1, 2, 2, 3, 3, D, D_v, dtype, ON_GPU))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Simulates a GPU and kernels that are built for it."""

    def pretend(
        capability: tuple[int, int] = H100,
        driver: int = 13000,
        built: tuple[str, ...] = BUILT,
        cuda: str = "13.0",
    ) -> None:
        built_for.cache_clear()
        info = {"cuda": cuda, "cuda_architectures": list(built)}
        monkeypatch.setattr(_C, "build_info", lambda: info)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        version = driver // 1000, driver % 1000 // 10
        monkeypatch.setattr(cuda_support, "cuda_driver_version", lambda: version)

    monkeypatch.setattr(torch.version, "hip", None)
    return pretend


@pytest.fixture(autouse=True)
def _clear_caches() -> Iterator[None]:
    built_for.cache_clear()
    _known_reason.cache_clear()
    yield
    built_for.cache_clear()
    _known_reason.cache_clear()


def test_supported_problems_have_no_reasons(gpu: Callable[..., None]) -> None:
    gpu()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert BACKEND.unsupported_reasons(problem(dtype=dtype)) == []
    assert BACKEND.unsupported_reasons(problem(D=1, D_v=256)) == []


def test_the_extension_exports_the_tile_config() -> None:
    """The build parses tile_config.h; the extension compiles it."""
    assert _C.CUDA_WIDTHS == WIDTHS
    assert _C.CUDA_LINEAR_WIDTHS == LINEAR_WIDTHS
    assert {divmod(chip, 10) for chip in _C.LARGE_SHARED_CHIPS} == LARGE_SHARED


def test_all_reasons_are_reported(gpu: Callable[..., None]) -> None:
    gpu(capability=(7, 5))
    wide = problem(D=257, dtype=torch.float64)
    assert BACKEND.unsupported_reasons(wide) == [
        "the GPU is sm_75; the cuda backend needs sm_80 or later",
        "float64: these kernels compute in float32",
        "rows of 257 elements: tiles are up to 256 wide",
    ]


def test_other_devices() -> None:
    x = torch.randn(1, 2, 3, 4, device="meta")
    with pytest.raises(ValueError, match="are on meta; the cuda backend needs CUDA tensors"):
        tk.attention(x, x, x, backend="cuda")


def test_an_extension_without_cuda(gpu: Callable[..., None]) -> None:
    gpu(built=())
    assert "the extension is built without CUDA kernels" in str(unsupported_device_reason(ON_GPU))


def test_no_gpu(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert unsupported_device_reason(ON_GPU) == "no CUDA device is available"


def test_every_device_is_asked_once(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPUs of a machine may differ. A device without an index is the current one: it is asked
    at every call."""
    gpu()
    asked: list[int | None] = []

    def capability(device: torch.device) -> tuple[int, int]:
        asked.append(device.index)
        return (7, 5) if device.index == 1 else H100

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    for _ in range(2):
        assert unsupported_device_reason(torch.device("cuda", 0)) is None
        assert "the GPU is sm_75" in str(unsupported_device_reason(torch.device("cuda", 1)))
    assert asked == [0, 1]
    for _ in range(2):
        assert unsupported_device_reason(ON_GPU) is None
    assert asked == [0, 1, None, None]


def test_amd_gpu(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert unsupported_device_reason(ON_GPU) == "the cuda backend needs an NVIDIA GPU"


def test_no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated kernels need the extension too, for the fake implementations of their operators."""
    x = torch.randn(1, 2, 3, 4)
    monkeypatch.setattr(extension, "unavailable_reason", lambda: "no luck")
    assert unsupported_device_reason(ON_GPU) == "no luck"
    assert tk.explain(x, x, x).reasons["cuda"] == ("no luck",)


OLDER_BINARY = "the driver is for CUDA 12.8, and the kernels are built by CUDA 13.0"
OLDER_PTX = "the driver is for CUDA 13.0, and the kernels' PTX is built by CUDA 13.2"


DRIVERS = (
    *(("13.0", H100, 12080, OLDER_BINARY), ("13.0", H100, 13000, None)),
    *(("13.0", H100, 13010, None), ("13.2", H100, 13000, None), ("13.2", H100, 13020, None)),
    *(("13.2", H100, 14000, None), ("13.2", (12, 0), 13000, OLDER_PTX)),
    *(("13.2", (12, 0), 13020, None), ("13.2", (12, 0), 14000, None)),
)
"""CUDA of the build, compute capability, driver, and the reason against it."""


def test_older_drivers(gpu: Callable[..., None]) -> None:
    """They run newer binary code of their major version, but cannot compile newer PTX."""
    for cuda, capability, driver, reason in DRIVERS:
        gpu(capability, driver, cuda=cuda)
        assert unsupported_device_reason(ON_GPU) == reason


@each(
    ("capability", "architectures", "runs"),
    [
        ((8, 0), BUILT, True),
        ((8, 9), ("sm_86",), True),
        ((8, 6), ("sm_80",), False),
        ((8, 9), ("sm_80", "sm_90", "compute_86"), False),
        ((8, 9), ("sm_80", "sm_86"), True),
        ((8, 7), ("sm_80",), True),
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_80", "sm_86"), False),
        ((10, 0), ("sm_80", "sm_90"), False),
        ((9, 0), WITH_HOPPER, True),
        ((9, 0), ("sm_80", "sm_90a"), False),
        ((10, 0), WITH_HOPPER, True),
        ((10, 0), ("sm_90", "sm_90a"), False),
        ((12, 0), ("sm_80", "compute_86"), True),
        ((8, 0), ("sm_90", "compute_86"), False),
        ((12, 1), ("sm_120",), True),
    ],
)
def test_code_runs_on_compatible_gpus(
    capability: tuple[int, int], architectures: tuple[str, ...], runs: bool
) -> None:
    reason = _unsupported_gpu_reason(capability, architectures)
    assert (reason is None) == runs
    if reason is not None:
        major, minor = capability
        assert re.search(
            rf"is sm_{major}{minor}, .* TORCH_CUDA_ARCH_LIST={major}\.{minor}$", reason
        )


@pytest.mark.parametrize(("status", "expected"), [(0, (12, 8)), (3, None)])
def test_version_is_that_of_the_driver(
    status: int, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_version(pointer: Any) -> int:
        pointer._obj.value = 12080
        return status

    monkeypatch.setattr(
        ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=get_version)
    )
    assert cuda_driver_version() == expected


def test_no_driver_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert cuda_driver_version() is None
