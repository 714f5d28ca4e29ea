"""The contract of `attention`: every case of the table, for every backend and dtype."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import TABLE_WAYS, WITH_FLOAT64, dtypes_of
from tests.support.case import assert_case, named
from tests.support.cases import CASES, Case
from tests.support.operators import operators_run_by
from tests.support.plain import plain_attention
from tests.support.tiers import crossed
from transformer_kernels.bench.tolerance import assert_same_function, assert_within_rule

ROOT = Path(tk.__file__).parents[1]


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("case", "backend", "dtype", "device"), crossed(CASES, TABLE_WAYS))
def test_case(case: Case, backend: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_case(case, dtype, backend, device)


def test_every_backend_supports_every_case() -> None:
    """The only reason against a case is a width that the cuda backend does not support."""
    backends = {(backend, device) for backend, _, device in TABLE_WAYS}
    for case, (backend, device) in itertools.product(CASES, backends):
        too_wide = backend == "cuda" and max(case.D, case.D_v) > 256
        assert len(case.reasons(backend, device)) == too_wide, (case.name, backend)


def test_dtypes_of_outputs(backend: str) -> None:
    for dtype in dtypes_of(backend):
        x = torch.randn(1, 2, 3, 4, dtype=dtype)
        o, lse = tk.attention(x, x, x, sinks=torch.zeros(2), return_lse=True, backend=backend)
        assert o.dtype == dtype
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 50.0, 1e4])
def test_scores_of_any_size(magnitude: float, backend: str) -> None:
    """From uniform rows to one-hot rows, without overflow or underflow of exp."""
    q, k, v = (torch.randn(1, 2, 70, 8) for _ in range(3))
    q *= magnitude
    exact, lse = tk.attention(
        q.double(), k.double(), v.double(), return_lse=True, backend="reference"
    )
    plain, _ = plain_attention(q, k, v)
    o = tk.attention(q, k, v, backend=backend)
    assert_within_rule("o", o, exact, plain, lse=float(lse.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_outputs_round_to_nearest(dtype: torch.dtype, backend: str) -> None:
    """Truncation would bias the results by half a unit in the last place."""
    x = [torch.randn(1, 4, 128, 32).to(dtype).requires_grad_() for _ in range(3)]
    exact_x = [y.detach().double().requires_grad_() for y in x]
    do = torch.randn(1, 4, 128, 32).to(dtype)
    o, exact = tk.attention(*x, backend=backend), tk.attention(*exact_x, backend="reference")
    got = [o, *torch.autograd.grad(o, x, do)]
    expected = [exact, *torch.autograd.grad(exact, exact_x, do.double())]
    for one, other in zip(got, expected, strict=True):
        ulp = torch.finfo(dtype).eps * other.abs().log2().floor().exp2()
        too_large = (one.double() - other) * other.sign()
        assert abs(too_large.sum() / ulp.sum()) < 0.1


@pytest.mark.parametrize("backend", WITH_FLOAT64)
def test_sinks_equal_an_extra_key_column(backend: str) -> None:
    """The extra key has the sink as its score and a value of 0; in float64."""
    q, k, v = (torch.randn(2, 3, 9, 4, dtype=torch.float64) for _ in range(3))
    sinks = torch.randn(3, dtype=torch.float64)
    k_sink, v_sink = (torch.cat([x, torch.zeros(2, 3, 1, 4)], dim=2) for x in (k, v))
    column = torch.cat([torch.zeros(3, 9, 9), sinks[:, None, None].expand(3, 9, 1)], dim=2)
    got = tk.attention(q, k, v, sinks=sinks, return_lse=True, backend=backend)
    exact = tk.attention(q, k_sink, v_sink, bias=column, return_lse=True, backend="reference")
    assert_same_function(got, exact)


def test_transposed_tensors_are_not_copied() -> None:
    """(B, T, H, D) viewed as (B, H, T, D): no copy, and o, dq, dk and dv have the same layout."""
    q, k, v = (torch.randn(2, 67, 4, 16).transpose(1, 2).requires_grad_() for _ in range(3))
    do = torch.randn(2, 67, 4, 16).transpose(1, 2)

    def step() -> tuple[Tensor, ...]:
        o = tk.attention(q, k, v, mask=tk.Mask.causal(), backend="cpu")
        return o, *torch.autograd.grad(o, (q, k, v), do)

    assert all(x.transpose(1, 2).is_contiguous() for x in step())
    ran = operators_run_by(step)
    for name in ("aten::copy_", "aten::clone", "aten::cat"):
        assert name not in ran


REPEATED: list[Case] = named(
    CASES, "gqa-everything", "all-masks", "bias-1111", "bias-b1mn", "mqa", "many-keys"
)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("backend", WITH_FLOAT64)  # interpreted kernels always run in one order
@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_gradients_are_bit_identical_across_runs(case: Case, backend: str) -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(4)
    try:
        runs = [case.run(case.inputs(torch.float32), backend) for _ in range(6)]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(run[name], value) for name, value in runs[0].items())


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_forward_does_not_depend_on_the_number_of_threads(case: Case) -> None:
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        results.append(case.run(case.inputs(torch.float32), "cpu"))
    for other in results[1:]:
        assert torch.equal(other["o"], results[0]["o"])
        assert torch.equal(other["lse"], results[0]["lse"])
        for name, value in other.items():
            assert_same_function(value, results[0][name])


@pytest.mark.usefixtures("threads")
def test_concurrent_callers_are_independent() -> None:
    torch.set_num_threads(2)
    work = [case.inputs(torch.float32) for case in REPEATED] * 4
    expected = [case.run(x, "cpu") for case, x in zip(REPEATED * 4, work, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(Case.run, REPEATED * 4, work, ["cpu"] * len(work)))
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one["o"], other["o"])
        for name, value in one.items():
            assert_same_function(value, other[name])


PEAK = """
import pathlib, re, torch, transformer_kernels as tk
def step(S, mask, backend, dropout_p):
    q, k, v = (torch.randn(1, 1, S, 16, requires_grad=True) for _ in range(3))
    bias = torch.zeros(1, 1, 1, S, requires_grad=True)
    o = tk.attention(q, k, v, mask=mask, bias=bias, softcap=5.0, dropout_p=dropout_p, seed=1,
                     backend=backend)
    torch.autograd.grad(o.sum(), (q, k, v, bias))
def peak():  # MiB; getrusage would include the parent process
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) // 1024
torch.set_num_threads(2)
attn_mask = torch.zeros(4096, 4096, dtype=torch.bool)  # M x N memory of the caller: 16 MiB
attn_mask[:, ::3] = True
small, large = tk.Mask.causal(), tk.Mask.window(3000, 3000) & tk.Mask.dense(attn_mask)
step(64, small, "cpu", 0.1); step(64, small, "reference", 0.0)
before = peak(); step(4096, large, "cpu", 0.1)
between = peak(); step(4096, large, "reference", 0.0)
print(between - before, peak() - between)
"""


@pytest.mark.exhaustive
def test_memory_is_linear_in_the_length() -> None:
    """At S = 4096 a float32 S x S matrix is 64 MiB. The reference proves that it is detected."""
    run = subprocess.run(
        [sys.executable, "-c", PEAK],
        check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    fused, naive = map(int, run.stdout.split())
    assert fused < 16
    assert naive > 128
