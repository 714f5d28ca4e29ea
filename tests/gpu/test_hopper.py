"""The Hopper kernels (csrc/cuda/sm90) on a GPU: which kernels run, and their results."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import transformer_kernels as tk
from tests.gpu.on_device import tensors
from tests.kernels.cuda.hopper_cases import HOPPER_CASES, HOPPER_VARLEN
from tests.support.case import assert_case
from tests.support.cases import Case
from tests.support.varlen_cases import VarlenCase
from transformer_kernels.backends.native.cuda_support import not_built_reason, runs_hopper
from transformer_kernels.functional.explain import explain

pytestmark = pytest.mark.gpu

HALF_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if (reason := not_built_reason()) is not None:
        pytest.skip(reason)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the GPU is not a Hopper GPU (compute capability 9.0)")


@HALF_DTYPES
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", [*HOPPER_CASES, *HOPPER_VARLEN], ids=str)
def test_case(case: Case | VarlenCase, dtype: torch.dtype) -> None:
    assert_case(case, dtype, "cuda", "cuda")


@HALF_DTYPES
@pytest.mark.parametrize("D", [64, 128, 192, 256])
def test_sm90_kernels_run(D: int, dtype: torch.dtype) -> None:
    """Checked by the kernel names that the profiler records."""
    assert runs_hopper(torch.device("cuda"))
    x = tensors(D=D, dtype=dtype)
    kernel = explain(*x[:3], backend="cuda").kernel
    assert kernel is not None
    assert "sm80" not in kernel
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        tk.attention(*x[:3], backend="cuda").sum().backward()
        torch.cuda.synchronize()
    keys = [event.key for event in profiler.key_averages()]
    assert any("sm90::forward_kernel" in key for key in keys)
    assert any("sm90::backward_kernel" in key for key in keys)


@pytest.mark.parametrize("D", [64, 128, 192, 256])
def test_several_tiles_per_persistent_cta(D: int) -> None:
    """All heads are equal, so a CTA's later tiles must equal its first one."""
    x = tensors(B=1, H=1, M=1000, N=777, D=D)
    q, k, v = (one.detach().expand(4, 40, -1, -1).contiguous() for one in x[:3])
    mask = tk.Mask.causal(align="bottom_right")
    o = tk.attention(q, k, v, mask=mask, backend="cuda")
    assert torch.equal(o, o[:1, :1].expand_as(o))
    exact = tk.attention(*(one.detach().double() for one in x[:3]), mask=mask, backend="reference")
    torch.testing.assert_close(o[:1, :1].double(), exact, atol=0.02, rtol=0.02)
