"""What the backend "cuda" says it can take, and why not."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from building.tile_config import LARGE_SHARED, WIDTHS
from transformer_kernels import _C, torch_private
from transformer_kernels.backends import CudaBackend
from transformer_kernels.backends.native import cuda_support, extension
from transformer_kernels.backends.native.cuda_support import (
    _reason_against_chip,
    built_for,
    reason_against,
)
from transformer_kernels.problem import AttentionProblem, TensorArgs

BACKEND = CudaBackend()
ON_GPU = torch.device("cuda")
H100 = (9, 0)
BUILT = ("sm_80", "sm_86", "sm_90", "compute_86")
WITH_HOPPER = ("sm_80", "sm_86", "sm_90", "sm_90a", "compute_86")


def problem(D: int = 64, D_v: int = 64, dtype: torch.dtype = torch.bfloat16) -> AttentionProblem:
    return AttentionProblem(1, 2, 2, 3, 3, D, D_v, dtype, ON_GPU, 0.125)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that there is one, and kernels for it."""

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
        monkeypatch.setattr(torch_private, "cuda_driver_version", lambda: version)
        monkeypatch.setattr(cuda_support, "runs_hopper", lambda device: hopper)

    monkeypatch.setattr(torch.version, "hip", None)
    return pretend


@pytest.fixture(autouse=True)
def _look_again() -> None:
    built_for.cache_clear()


def test_it_takes_what_it_is_for(gpu: Callable[..., None]) -> None:
    gpu()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert BACKEND.unsupported_reasons(problem(dtype=dtype)) == []
    assert BACKEND.unsupported_reasons(problem(D=1, D_v=256)) == []


@pytest.mark.parametrize(
    ("D", "D_v", "width"), [(1, 1, 32), (33, 8, 64), (64, 65, 96), (128, 128, 128), (5, 256, 256)]
)
def test_the_kernel_is_named(D: int, D_v: int, width: int, gpu: Callable[..., None]) -> None:
    gpu()
    assert kernel(problem(D, D_v)) == f"csrc/cuda/sm80, bfloat16, width {width}, sm_90"
    assert width in WIDTHS


def kernel(p: AttentionProblem) -> str:
    q, k = torch.empty(p.B, p.H_q, p.M, p.D, dtype=p.dtype), torch.empty(p.B, p.H_kv, p.N, p.D)
    return BACKEND.kernel(p, q, k, torch.empty(p.B, p.H_kv, p.N, p.D_v), TensorArgs())


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
def test_the_kernel_of_hopper_is_named(
    D: int, D_v: int, dtype: torch.dtype, widths: str | None, gpu: Callable[..., None]
) -> None:
    """tests/csrc/cuda/test_hopper.py holds it against what runs."""
    gpu(built=WITH_HOPPER, hopper=True)
    told, name = kernel(problem(D, D_v, dtype)), str(dtype).removeprefix("torch.")
    if widths is None:
        assert told.startswith(f"csrc/cuda/sm80, {name}, width ")
    else:
        assert told == f"csrc/cuda/sm90, {name}, width {widths}, sm_90"


def test_other_chips_have_no_kernel_of_hopper(gpu: Callable[..., None]) -> None:
    gpu(capability=(10, 0), built=(*WITH_HOPPER, "sm_100"))
    assert kernel(problem()) == "csrc/cuda/sm80, bfloat16, width 64, sm_100"


def test_the_extension_exports_the_tile_config() -> None:
    """The build parses the header that the extension is compiled from."""
    assert _C.CUDA_WIDTHS == WIDTHS
    assert {divmod(chip, 10) for chip in _C.LARGE_SHARED_CHIPS} == LARGE_SHARED


def test_every_reason_is_said(gpu: Callable[..., None]) -> None:
    gpu(capability=(7, 5))
    wide = problem(D=257, dtype=torch.float64)
    assert BACKEND.unsupported_reasons(wide) == [
        "the GPU is sm_75; these kernels need sm_80 or later",
        "float64: these kernels compute in float32",
        "rows of 257 elements: tiles are up to 256 wide",
    ]


def test_slopes_that_require_grad(x: Tensor) -> None:
    slopes = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"backend='cuda' cannot.*: .*ALiBi slopes"):
        tk.attention(x, x, x, bias=tk.alibi(slopes), backend="cuda")


@pytest.fixture
def x() -> Tensor:
    return torch.randn(1, 2, 3, 4)


def test_other_devices(x: Tensor) -> None:
    x = x.to("meta")
    with pytest.raises(ValueError, match="tensors are on meta, these kernels run on a CUDA device"):
        tk.attention(x, x, x, backend="cuda")


def test_an_extension_without_cuda(gpu: Callable[..., None]) -> None:
    gpu(built=())
    assert "the extension is built without CUDA kernels" in str(reason_against(ON_GPU))


def test_no_gpu(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reason_against(ON_GPU) == "there is no GPU here"


def test_gpus_of_others(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert reason_against(ON_GPU) == "these kernels are for NVIDIA's GPUs"


def test_no_extension(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    """Also where kernels are emulated: their operators' fakes are the extension's."""
    monkeypatch.setattr(extension, "unavailable_reason", lambda: "no luck")
    assert reason_against(ON_GPU) == "no luck"
    assert tk.explain(x, x, x).reasons["cuda"] == ("no luck",)


@pytest.mark.parametrize(("driver", "runs"), [(12080, False), (13000, True), (13010, True)])
def test_drivers_of_an_earlier_cuda(driver: int, runs: bool, gpu: Callable[..., None]) -> None:
    gpu(driver=driver)
    reason = "the driver is for CUDA 12.8, and the kernels are built by CUDA 13.0"
    assert reason_against(ON_GPU) == (None if runs else reason)


@pytest.mark.parametrize(("driver", "runs"), [(13000, False), (13020, True), (14000, True)])
def test_drivers_of_an_earlier_cuda_and_ptx(
    driver: int, runs: bool, gpu: Callable[..., None]
) -> None:
    """They take later binary code of their major version, but not what they would compile."""
    gpu(driver=driver, built=("sm_90", "compute_86"), cuda="13.2")
    assert reason_against(ON_GPU) is None
    gpu(capability=(12, 0), driver=driver, built=("sm_90", "compute_86"), cuda="13.2")
    reason = "the driver is for CUDA 13.0, and the kernels' PTX is built by CUDA 13.2"
    assert reason_against(ON_GPU) == (None if runs else reason)


@pytest.mark.parametrize(
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
def test_which_chips_code_runs_on(
    capability: tuple[int, int], architectures: tuple[str, ...], runs: bool
) -> None:
    reason = _reason_against_chip(capability, architectures)
    assert (reason is None) == runs
    if reason is not None:
        major, minor = capability
        assert re.search(
            rf"is sm_{major}{minor}, .* TORCH_CUDA_ARCH_LIST={major}\.{minor}$", reason
        )
