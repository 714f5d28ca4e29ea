from __future__ import annotations

import pytest
import torch

from transformer_kernels.api import attention
from transformer_kernels.bench import Case, Direction, Outputs, exact_outputs, run_once
from transformer_kernels.mask import Mask

CASE = Case(name="grouped", B=2, H_q=4, H_kv=2, M=7, N=9, D=4, D_v=3, mask=Mask.window(3, 2))


def test_exact_outputs_are_float64_of_all_heads_at_once() -> None:
    inputs = CASE.inputs()
    doubles = type(inputs)(*(x.double() for x in inputs))
    exact = exact_outputs(CASE, inputs)
    whole = run_once(
        lambda q, k, v: attention(q, k, v, mask=CASE.mask, backend="reference"), doubles
    )
    for got, want in zip(exact, whole, strict=True):
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("direction", "worst"), [("fwd", 0.125), ("bwd", 0.5), ("fwd+bwd", 0.5)])
def test_the_error_is_the_worst_tensor_s_relative_to_its_largest_value(
    direction: Direction, worst: float
) -> None:
    exact = Outputs(*(torch.tensor([1.0, -8.0], dtype=torch.float64) for _ in range(4)))
    o, dk = torch.tensor([2.0, -8.0]), torch.tensor([1.0, -4.0])
    got = Outputs(o, exact.dq.float(), dk, exact.dv.float())
    assert got.error(exact, direction) == worst
