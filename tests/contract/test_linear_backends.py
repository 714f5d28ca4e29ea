"""What both GPU backends of linear attention promise: bits, clamped offsets, steps, limits.

Without a GPU the cuda backend is emulated and the triton backend interpreted.
"""

from __future__ import annotations

import pytest
import torch

import transformer_kernels as tk
from tests.support.backends import NAMES
from tests.support.case import assert_case
from tests.support.linear import linear_arguments, operators_of, steps_case
from transformer_kernels.linear.backends import LINEAR_BACKENDS, STEP_BACKENDS
from transformer_kernels.linear.triton import TritonLinear

DEVICES = {name: "cpu" for name in ("cuda", "triton") if name in NAMES}
if torch.cuda.is_available():
    DEVICES["triton"] = "cuda"
BACKENDS = {backend.name: backend for backend in LINEAR_BACKENDS}
both = pytest.mark.parametrize(("backend", "device"), DEVICES.items())


def test_steps_prefer_cuda_and_passes_triton() -> None:
    assert set(STEP_BACKENDS) == set(LINEAR_BACKENDS)
    steps, passes = ([backend.name for backend in bs] for bs in (STEP_BACKENDS, LINEAR_BACKENDS))
    assert steps.index("cuda") < steps.index("triton")
    assert TritonLinear.is_interpreted or passes.index("triton") < passes.index("cuda")


@both
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("D", "D_v"), [(9, 9), (90, 150), (250, 20)])
def test_steps_of_every_width(D: int, D_v: int, backend: str, device: str) -> None:
    """Slices of v, or 64 columns at a time, are computed from the same z."""
    assert_case(steps_case(D, D_v), torch.float32, backend, device)


@both
def test_bits_do_not_depend_on_the_batch_or_the_strides(backend: str, device: str) -> None:
    q, k, v = (torch.randn(1, 3, 100, 8, device=device).repeat(3, 1, 1, 1) for _ in range(3))
    first, end = tk.linear_attention(q, k, v, return_state=True, backend=backend)
    for x in (first, *end):
        assert torch.equal(x, x[:1].expand_as(x))
    strided = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert torch.equal(tk.linear_attention(*strided, backend=backend), first)
    columns = (x.mT.contiguous().mT for x in (q, k, v))
    assert torch.equal(tk.linear_attention(*columns, backend=backend), first)


@both
@pytest.mark.usefixtures("poisoned")
def test_offsets_beyond_the_rows_are_clamped(backend: str, device: str) -> None:
    """Values of cu_seqlens on a device are not checked: the kernels stay within the rows."""
    forward, *_ = operators_of(BACKENDS[backend], device)
    x = [torch.randn(1, 2, 150, 8, device=device) for _ in range(3)]

    def run(*offsets: int) -> list[torch.Tensor]:
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
        results = forward(*linear_arguments(*x, cu_seqlens=cu_seqlens).values())
        return list(results)

    whole = run(0, 70, 150)
    for offsets in ((0, 70, 1000), (-5, 70, 150), (-5, 70, 2**31 - 1)):
        for got, expected in zip(run(*offsets), whole, strict=True):
            assert torch.equal(got, expected)
    assert run(0, 90, 60)[0][:, :, :90].isfinite().all()  # offsets that decrease
    assert not run(100, 150)[0][:, :, :100].any()  # offsets that begin late


@both
@pytest.mark.parametrize(
    ("width", "dtype", "reason"),
    [
        (257, torch.float32, "rows of 257 elements: tiles are up to 256 wide"),
        (8, torch.float64, "float64: these kernels compute in float32"),
    ],
)
def test_limits(width: int, dtype: torch.dtype, reason: str, backend: str, device: str) -> None:
    x = torch.zeros(1, 1, 3, width, dtype=dtype, device=device)
    with pytest.raises(ValueError, match=reason):
        tk.linear_attention(x, x, x, backend=backend)
    report = tk.explain(x, x, x, operator=tk.linear_attention)
    assert report.chosen != backend
    assert reason in str(report)
