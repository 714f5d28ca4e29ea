"""The matrix of all weights, which the tolerance rule compares with, equals the definition."""

from __future__ import annotations

import torch

from tests.support.linear import LINEAR_CASES, LinearCase
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function


@each("case", [c for c in LINEAR_CASES if c.decay != "reset"], ids=str)
def test_the_matrix_equals_the_loop(case: LinearCase) -> None:
    x = case.inputs(torch.float64)
    assert_same_function(case.by_matrix(x), case.by_loop(x))
