from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from transformer_kernels.bench import Case, Direction, Outputs, exact_outputs, run_once
from transformer_kernels.bench.cases import SEED
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.functional.attention import attention
from transformer_kernels.masks.mask import Mask

PLAIN = Case(name="grouped", B=2, H_q=4, H_kv=2, M=7, N=9, D=4, D_v=3, mask=Mask.window(3, 2))
BIASED = replace(PLAIN, bias=torch.randn(2, 4, 7, 9, dtype=torch.float64, requires_grad=True))
DROPPED = replace(PLAIN, dropout_p=0.5)


@pytest.mark.parametrize("case", [PLAIN, BIASED, DROPPED], ids=["plain", "bias", "dropout"])
def test_exact_outputs_are_float64_of_all_heads_at_once(case: Case) -> None:
    inputs = case.inputs()
    doubles = type(inputs)(*(x.double() for x in inputs))
    exact = exact_outputs(case, inputs)
    whole = run_once(
        lambda q, k, v: attention(
            q, k, v,
            mask=case.mask, bias=case.bias, dropout_p=case.dropout_p, seed=SEED,
            backend="reference",
        ),
        doubles,
        case.learned,
    )  # fmt: skip
    assert exact.tensors().keys() == whole.tensors().keys()
    assert ("dbias" in exact.tensors()) == (case.bias is not None)
    for name, got in exact.tensors().items():
        assert got.dtype == torch.float64
        assert_same_function(got, whole.tensors()[name])


@pytest.mark.parametrize(("direction", "worst"), [("fwd", 0.125), ("bwd", 0.5), ("fwd+bwd", 0.5)])
def test_the_error_is_that_of_the_worst_tensor_relative_to_its_largest_value(
    direction: Direction, worst: float
) -> None:
    exact = Outputs(*(torch.tensor([1.0, -8.0], dtype=torch.float64) for _ in range(4)))
    o, dk = torch.tensor([2.0, -8.0]), torch.tensor([1.0, -4.0])
    got = Outputs(o, exact.dq.float(), dk, exact.dv.float())
    assert got.error(exact, direction) == worst


def test_the_error_includes_the_bias_gradient() -> None:
    one = torch.ones(1, dtype=torch.float64)
    exact = Outputs(one, one, one, one, one)
    got = exact._replace(dbias=one * 1.25)
    assert [got.error(exact, direction) for direction in ("fwd", "bwd")] == [0.0, 0.25]
