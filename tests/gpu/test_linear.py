"""Linear attention on a CUDA device: long sequences, equal bits, the choice of a backend."""

from __future__ import annotations

import pytest
import torch

import transformer_kernels as tk
from tests.support.case import assert_case, named
from tests.support.linear import LINEAR_CASES, LinearCase
from transformer_kernels.backends.native.cuda_support import not_built_reason

pytestmark = pytest.mark.gpu


def test_results_are_bit_identical_across_runs(backend: str) -> None:
    (case,) = named(LINEAR_CASES, "gqa")
    x = case.inputs(torch.bfloat16, "cuda")
    first, second = (case.run(x, backend) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_packed_sequences(backend: str) -> None:
    """One of them is longer than the states of a chunk."""
    case = LinearCase(name="packed-long", packed=(700, 0, 1, 2299), trailing=1, D=64, D_v=64)
    assert_case(case, torch.float32, backend, "cuda")


@pytest.mark.parametrize("D", [64, 96])
def test_decoding_in_many_steps(D: int, backend: str) -> None:
    case = LinearCase(name="many-steps", steps=(100, *(1,) * 30), H_q=4, H_kv=4, D=D, D_v=D)
    assert_case(case, torch.bfloat16, backend, "cuda")


def test_auto_chooses_the_faster_backend() -> None:
    """Triton, except for a step of decoding: there the launch from Python would take longest."""
    q, k, v = (torch.randn(1, 1, 3, 8, device="cuda") for _ in range(3))
    assert tk.explain(q, k, v, operator=tk.linear_attention).chosen == "triton"
    one = q[:, :, :1]
    _, state = tk.linear_attention(q, k, v, return_state=True, backend="triton")
    step = tk.explain(one, one, one, state, operator=tk.linear_attention_decode)
    assert step.chosen == ("cuda" if not_built_reason() is None else "triton")
