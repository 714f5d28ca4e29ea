"""Linear attention: the matrix that kernels are compared with, promises of both GPU backends, and
segments, rounding and tiles of the Triton kernels.

Without a GPU the cuda backend is emulated and the triton backend interpreted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import transformer_kernels as tk
from tests.support.backends import NAMES
from tests.support.case import assert_case
from tests.support.linear import (
    LINEAR_CASES,
    LinearCase,
    linear_arguments,
    operators_of,
    steps_case,
)
from tests.support.tiers import each
from transformer_kernels.backends.triton.config import CHIPS
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.linear.attention import LINEAR_BACKENDS, STEP_BACKENDS
from transformer_kernels.linear.triton import TritonLinear, passes, tiles
from transformer_kernels.linear.triton.kernels.arithmetic import rounded_to_tf32
from transformer_kernels.linear.types import Inputs, Options


@each("case", [c for c in LINEAR_CASES if c.decay != "reset"], ids=str)
def test_the_matrix_equals_the_loop(case: LinearCase) -> None:
    x = case.inputs(torch.float64)
    assert_same_function(case.by_matrix(x), case.by_loop(x))


DEVICES = {name: "cpu" for name in ("cuda", "triton") if name in NAMES}
if torch.cuda.is_available():
    DEVICES["triton"] = "cuda"
BACKENDS = {backend.name: backend for backend in LINEAR_BACKENDS}
both = pytest.mark.parametrize(("backend", "device"), DEVICES.items())


def test_steps_prefer_cuda_and_passes_triton() -> None:
    assert set(STEP_BACKENDS) == set(LINEAR_BACKENDS)
    steps, names = ([backend.name for backend in bs] for bs in (STEP_BACKENDS, LINEAR_BACKENDS))
    assert steps.index("cuda") < steps.index("triton")
    after = "reference" if TritonLinear.is_interpreted else "cuda"
    assert (names.index("triton") > names.index(after)) == TritonLinear.is_interpreted


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
def test_limits_of_gpu_backends(
    width: int, dtype: torch.dtype, reason: str, backend: str, device: str
) -> None:
    x = torch.zeros(1, 1, 3, width, dtype=dtype, device=device)
    with pytest.raises(ValueError, match=reason):
        tk.linear_attention(x, x, x, backend=backend)
    report = tk.explain(x, x, x, operator=tk.linear_attention)
    assert report.chosen != backend
    assert reason in str(report)


DEVICE = DEVICES["triton"]


def test_segments() -> None:
    def segments(B: int, N: int, *, width: int = 64, packed: bool = False) -> passes.Segments:
        k = torch.empty(1 if packed else B, 8, N, width, dtype=torch.bfloat16)
        starts = torch.empty(B + 1, dtype=torch.int32) if packed else None
        x = Inputs(k, k, k, cu_seqlens=starts)
        options = Options("elu", causal=True, normalize=True, eps=1e-6)
        return passes.prepare(x, options).segments(N)

    assert not segments(3, 128).are_several
    assert segments(3, 129) == passes.Segments(129, 128, 2, programs=6, boundaries=9)
    assert segments(1, 65536, width=130).tokens == 512
    assert segments(10, 65536, packed=True).programs == 512 + 20
    assert segments(0, 65536, packed=True).programs == 0


@triton.jit  # type: ignore[untyped-decorator]
def round_kernel(x: Any, y: Any, SIZE: tl.constexpr) -> None:
    i = tl.arange(0, SIZE)
    tl.store(y + i, rounded_to_tf32(tl.load(x + i)))


def test_tf32_operands_are_rounded_to_nearest_even() -> None:
    bits = torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int64).to(torch.int32)
    special = [0x3F801000, 0x3F803000, 0x7FFFFFFF, 0x7F800000, -0x800000, 1, 0x7F7FFFFF]
    bits[: len(special)] = torch.tensor(special, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32).to(DEVICE)
    y = torch.empty_like(x)
    round_kernel[(1,)](x, y, SIZE=4096)
    exact = x.double().cpu().numpy()
    mantissa, exponent = np.frexp(exact)
    expected = np.ldexp(np.rint(mantissa * 2**11), np.maximum(exponent, -125) - 11)
    normal = np.abs(exact) >= 2.0**-126
    with np.errstate(over="ignore"):
        expected = expected.astype(np.float32)
    got = y.cpu().numpy()
    np.testing.assert_array_equal(got[normal], expected[normal])
    assert y[2].isnan()  # the NaN of a GPU, whose rounded bits would be those of -0
    assert y[3] == torch.inf


def test_every_precision_of_a_chip_has_tiles() -> None:
    """Chunks and slices are powers of 2 of at least 16, which matrix products need."""
    for chip in CHIPS.values():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for needs_grad in (False, True):
                precision = tiles.precision(chip, dtype, log_decay_needs_grad=needs_grad)
                for columns in (1, 64, 65, 128, 129, 256):
                    tile = tiles.tile(chip, columns, precision)
                    assert tile.chunk in (16, 32, 64)
                    assert tile.slice in (16, 32, 64, 128)
                    assert tiles.segment(columns) % tile.chunk == 0


def test_explain_names_the_tile() -> None:
    x = torch.zeros(1, 1, 3, 8, dtype=torch.bfloat16, device=DEVICE)
    report = tk.explain(x, x, x, operator=tk.linear_attention, backend="triton")
    assert "linear/triton" in str(report)
    assert "chunks of 64 tokens, 64 columns" in str(report)
