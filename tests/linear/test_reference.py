"""The reference, which computes chunks, equals the loop over tokens and the matrix of weights."""

from __future__ import annotations

import pytest
import torch

from tests.support.linear import (
    LINEAR_CASES,
    LinearCase,
    Outputs,
    linear_by_backend,
    linear_by_loop,
    linear_by_matrix,
    linear_inputs,
)


def assert_equal(got: Outputs, expected: Outputs) -> None:
    assert got.keys() == expected.keys()
    for name, value in got.items():
        largest = max(1.0, float(expected[name].abs().max())) if value.numel() else 1.0
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-13 * largest, msg=name)


@pytest.mark.parametrize("case", LINEAR_CASES, ids=str)
def test_equals_the_loop(case: LinearCase) -> None:
    x = linear_inputs(case, torch.float64)
    assert_equal(linear_by_backend(case, x, "reference"), linear_by_loop(case, x))


@pytest.mark.parametrize("case", [c for c in LINEAR_CASES if c.decay != "reset"], ids=str)
def test_equals_the_matrix(case: LinearCase) -> None:
    x = linear_inputs(case, torch.float64)
    assert_equal(linear_by_backend(case, x, "reference"), linear_by_matrix(case, x))
