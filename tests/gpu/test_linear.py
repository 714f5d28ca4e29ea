"""The shared table of cases of linear attention on a CUDA device."""

from __future__ import annotations

import pytest
import torch

import transformer_kernels as tk
from tests.support.linear import (
    LINEAR_CASES,
    LinearCase,
    assert_linear_case,
    linear_by_backend,
    linear_case,
    linear_inputs,
)
from transformer_kernels.backends.native.cuda_support import not_built_reason

pytestmark = pytest.mark.gpu


BROAD = ("gqa", "range", "reset", "all-lengths", "wide", "padding", "segments")
"""Cases that run in every dtype; each is compiled for seconds."""
CALLS = [
    (case, dtype)
    for case in LINEAR_CASES
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    if dtype == torch.bfloat16 or case.name in BROAD
]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("case", "dtype"), CALLS, ids=str)
def test_case(case: LinearCase, dtype: torch.dtype, backend: str) -> None:
    assert_linear_case(case, dtype, backend, "cuda")


def test_results_are_bit_identical_across_runs(backend: str) -> None:
    case = linear_case("gqa")
    x = linear_inputs(case, torch.bfloat16)
    first, second = (linear_by_backend(case, x, backend, "cuda") for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_packed_sequences(backend: str) -> None:
    starts = [0, 700, 700, 701, 3000]
    x = [torch.randn(3001, 2, 64, device="cuda", requires_grad=True) for _ in range(3)]
    q, k, v = x
    cu_seqlens = torch.tensor(starts, device="cuda")
    o = tk.linear_attention_varlen(q, k, v, cu_seqlens, backend=backend)
    got = torch.autograd.grad(o.sin().sum(), x)
    expected = tk.linear_attention_varlen(q, k, v, cu_seqlens, backend="reference")
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    wanted = torch.autograd.grad(expected.sin().sum(), x)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("D", [64, 96])
def test_decoding_continues_a_prompt(D: int, backend: str) -> None:
    q, k, v = (torch.randn(2, 4, 130, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    whole = tk.linear_attention(q, k, v, backend=backend)
    prompt = (x[:, :, :100] for x in (q, k, v))
    _, state = tk.linear_attention(*prompt, return_state=True, backend=backend)
    for n in range(100, 130):
        one = slice(n, n + 1)
        o = tk.linear_attention_decode(
            q[:, :, one], k[:, :, one], v[:, :, one], state, backend=backend
        )
        torch.testing.assert_close(o, whole[:, :, one], rtol=2e-2, atol=2e-2)


def test_auto_chooses_the_faster_backend() -> None:
    """Triton, except for a step of decoding: there the launch from Python would take longest."""
    q, k, v = (torch.randn(1, 1, 3, 8, device="cuda") for _ in range(3))
    assert tk.explain(q, k, v, operator=tk.linear_attention).chosen == "triton"
    one = q[:, :, :1]
    _, state = tk.linear_attention(q, k, v, return_state=True, backend="triton")
    step = tk.explain(one, one, one, state, operator=tk.linear_attention_decode)
    assert step.chosen == ("cuda" if not_built_reason() is None else "triton")
