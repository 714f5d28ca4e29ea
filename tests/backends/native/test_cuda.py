"""Supported problems of the cuda backend, and its reasons against the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from building.tile_config import LARGE_SHARED, LINEAR_WIDTHS, RELATIVE_WIDTHS, WIDTHS
from tests.support.tiers import each
from transformer_kernels import _C
from transformer_kernels.backends import CudaBackend
from transformer_kernels.backends.native import cuda_support, extension
from transformer_kernels.backends.native.cuda_support import (
    _known_reason,
    _unsupported_gpu_reason,
    built_for,
    unsupported_device_reason,
)
from transformer_kernels.masks.resolved import ResolvedMask
from transformer_kernels.problem import Layout, Problem, Shape
from transformer_kernels.scores.options import ScoreOptions

BACKEND = CudaBackend()
ON_GPU = torch.device("cuda")
H100 = (9, 0)
BUILT = ("sm_80", "sm_86", "sm_90", "compute_86")
WITH_HOPPER = ("sm_80", "sm_86", "sm_90", "sm_90a", "compute_86")


def problem(
    D: int = 64, D_v: int = 64, dtype: torch.dtype = torch.bfloat16, *, B: int = 1,
    H_q: int = 2, H_kv: int = 2, M: int = 3, N: int = 3,
) -> Problem:  # fmt: skip
    return Problem(Shape(B, H_q, H_kv, M, N, D, D_v, dtype, ON_GPU))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Simulates a GPU and kernels that are built for it."""

    def pretend(
        capability: tuple[int, int] = H100,
        driver: int = 13000,
        built: tuple[str, ...] = BUILT,
        cuda: str = "13.0",
        hopper: bool = False,
    ) -> None:
        built_for.cache_clear()
        info = {"cuda": cuda, "cuda_architectures": list(built)}
        monkeypatch.setattr(_C, "build_info", lambda: info)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        version = driver // 1000, driver % 1000 // 10
        monkeypatch.setattr(cuda_support, "cuda_driver_version", lambda: version)
        monkeypatch.setattr(cuda_support, "runs_hopper", lambda device: hopper)

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


@pytest.mark.parametrize(
    ("D", "D_v", "width"), [(1, 1, 32), (33, 8, 64), (64, 65, 96), (128, 128, 128), (5, 256, 256)]
)
def test_sm80_kernel_description(D: int, D_v: int, width: int, gpu: Callable[..., None]) -> None:
    gpu()
    assert kernel(problem(D, D_v)) == f"csrc/cuda/sm80, bfloat16, width {width}, sm_90"
    assert width in WIDTHS


def test_kernel_description_of_decoding(gpu: Callable[..., None]) -> None:
    """Decoding runs on sm80 kernels, also where the Hopper kernels run."""
    gpu(built=WITH_HOPPER, hopper=True)
    cached = replace(problem(), layout=Layout(cache_seqlens=torch.tensor([3])))
    assert kernel(cached) == "csrc/cuda/sm80/decode, bfloat16, width 64, sm_90"


def test_kernel_description_of_few_queries(gpu: Callable[..., None]) -> None:
    gpu(built=WITH_HOPPER, hopper=True)
    few = problem(H_q=8, H_kv=2, M=4, N=1024)
    backward = "csrc/cuda/sm90 backward, bfloat16, width 64/64, sm_90"
    assert kernel(few) == f"csrc/cuda/sm80/decode forward, {backward}"
    gpu()
    for one in (few, problem(B=32, H_q=8, H_kv=4, N=1024), problem(B=31, H_q=8, H_kv=8, N=1024)):
        assert "sm80/decode forward, csrc/cuda/sm80 backward" in kernel(one)
    for other in (
        problem(B=32, H_q=8, H_kv=8, N=1024),
        problem(H_q=8, H_kv=2, M=5, N=1024),
        problem(H_q=8, H_kv=2, M=4, N=1023),
        replace(few, scores=ScoreOptions(dropout_p=0.1, seed=torch.tensor(0))),
        replace(few, scores=ScoreOptions(bias=torch.zeros(1, 1, 1, 1))),
        replace(few, mask=ResolvedMask(dense=torch.ones(1, 1, 1, 1, dtype=torch.bool))),
    ):
        assert "decode" not in kernel(other)


def kernel(problem: Problem) -> str:
    p = problem.shape
    q, k = torch.empty(p.B, p.H_q, p.M, p.D, dtype=p.dtype), torch.empty(p.B, p.H_kv, p.N, p.D)
    return BACKEND.kernel(problem, q, k, torch.empty(p.B, p.H_kv, p.N, p.D_v))


@pytest.mark.parametrize(
    ("D", "D_v", "dtype", "widths"),
    [
        (64, 64, torch.float16, "64/64"),
        (64, 72, torch.bfloat16, "128/128"),
        (192, 128, torch.bfloat16, "192/128"),
        (8, 256, torch.bfloat16, "256/256"),
        (33, 64, torch.bfloat16, None),
        (64, 33, torch.bfloat16, None),
        (64, 64, torch.float32, None),
    ],
)
def test_hopper_kernel_description(
    D: int, D_v: int, dtype: torch.dtype, widths: str | None, gpu: Callable[..., None]
) -> None:
    """tests/csrc/cuda/test_hopper.py compares the description with the kernel that runs."""
    gpu(built=WITH_HOPPER, hopper=True)
    description, name = kernel(problem(D, D_v, dtype)), str(dtype).removeprefix("torch.")
    if widths is None:
        assert description.startswith(f"csrc/cuda/sm80, {name}, width ")
    else:
        assert description == f"csrc/cuda/sm90, {name}, width {widths}, sm_90"


def test_other_gpus_run_the_sm80_kernels(gpu: Callable[..., None]) -> None:
    gpu(capability=(10, 0), built=(*WITH_HOPPER, "sm_100"))
    assert kernel(problem()) == "csrc/cuda/sm80, bfloat16, width 64, sm_100"


def test_the_extension_exports_the_tile_config() -> None:
    """The build parses tile_config.h; the extension compiles it."""
    assert _C.CUDA_WIDTHS == WIDTHS
    assert _C.CUDA_RELATIVE_WIDTHS == RELATIVE_WIDTHS
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


@pytest.fixture
def x() -> Tensor:
    return torch.randn(1, 2, 3, 4)


def test_other_devices(x: Tensor) -> None:
    x = x.to("meta")
    with pytest.raises(
        ValueError, match="the tensors are on meta; the cuda backend needs CUDA tensors"
    ):
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


def test_no_extension(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    """Emulated kernels need the extension too, for the fake implementations of their operators."""
    monkeypatch.setattr(extension, "unavailable_reason", lambda: "no luck")
    assert unsupported_device_reason(ON_GPU) == "no luck"
    assert tk.explain(x, x, x).reasons["cuda"] == ("no luck",)


@pytest.mark.parametrize(("driver", "runs"), [(12080, False), (13000, True), (13010, True)])
def test_older_drivers_and_binary_code(driver: int, runs: bool, gpu: Callable[..., None]) -> None:
    gpu(driver=driver)
    reason = "the driver is for CUDA 12.8, and the kernels are built by CUDA 13.0"
    assert unsupported_device_reason(ON_GPU) == (None if runs else reason)


@pytest.mark.parametrize(("driver", "runs"), [(13000, False), (13020, True), (14000, True)])
def test_older_drivers_and_ptx(driver: int, runs: bool, gpu: Callable[..., None]) -> None:
    """Older drivers run newer binary code of their major version, but cannot compile newer PTX."""
    gpu(driver=driver, built=("sm_90", "compute_86"), cuda="13.2")
    assert unsupported_device_reason(ON_GPU) is None
    gpu(capability=(12, 0), driver=driver, built=("sm_90", "compute_86"), cuda="13.2")
    reason = "the driver is for CUDA 13.0, and the kernels' PTX is built by CUDA 13.2"
    assert unsupported_device_reason(ON_GPU) == (None if runs else reason)


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
