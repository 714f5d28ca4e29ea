"""The reference, which computes chunks, equals the loop over tokens and the matrix of weights."""

from __future__ import annotations

import torch

from tests.support.linear import (
    LINEAR_CASES,
    LinearCase,
    linear_by_backend,
    linear_by_loop,
    linear_by_matrix,
    linear_inputs,
)
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function


@each("case", LINEAR_CASES, ids=str)
def test_equals_the_loop(case: LinearCase) -> None:
    x = linear_inputs(case, torch.float64)
    assert_same_function(linear_by_backend(case, x, "reference"), linear_by_loop(case, x))


@each("case", [c for c in LINEAR_CASES if c.decay != "reset"], ids=str)
def test_equals_the_matrix(case: LinearCase) -> None:
    x = linear_inputs(case, torch.float64)
    assert_same_function(linear_by_backend(case, x, "reference"), linear_by_matrix(case, x))
