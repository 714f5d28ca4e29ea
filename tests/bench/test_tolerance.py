"""The tolerance rule accepts errors that rounding explains, and no others."""

from __future__ import annotations

import math

import pytest
import torch

from transformer_kernels.bench.tolerance import assert_within_rule, rounding_band

EXACT = torch.tensor([[1.0, -8.0], [0.5, 0.0]], dtype=torch.float64)


def test_the_limit_is_twice_the_error_of_plain_torch_plus_a_band() -> None:
    plain = (EXACT + 1e-3).float()
    limit = 2e-3 + rounding_band(EXACT, torch.float32)
    for name, error in (("inside", 0.99 * limit), ("below", -0.99 * limit)):
        got = EXACT.clone()
        got[0, 0] += error
        assert_within_rule(name, got.float(), EXACT, plain)
    got = EXACT.clone()
    got[0, 0] += 1.01 * limit
    with pytest.raises(AssertionError, match=r"dq \(torch.float32\): error .* at \(0, 0\)"):
        assert_within_rule("dq", got.float(), EXACT, plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_band_is_a_few_units_in_the_last_place(dtype: torch.dtype) -> None:
    ulp = torch.finfo(dtype).eps * 8.0
    assert 2 * ulp <= rounding_band(EXACT, dtype) <= 64 * ulp
    if dtype in (torch.bfloat16, torch.float16):
        assert rounding_band(EXACT, dtype) < 2.1 * ulp


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_must_be_at_the_exact_positions(value: float) -> None:
    with_value = EXACT.index_put((torch.tensor(1), torch.tensor(0)), torch.tensor(value).double())
    assert_within_rule("o", with_value.float(), with_value, with_value.float())
    for got, exact in ((with_value, EXACT), (EXACT, with_value)):
        with pytest.raises(AssertionError, match=r"misplaced at 1 positions, first \(1, 0\)"):
            assert_within_rule("o", got.float(), exact, EXACT.float())


def test_overflow_to_infinity_is_accepted() -> None:
    exact = torch.tensor([1e5], dtype=torch.float64)
    assert_within_rule("o", exact.half(), exact, exact.half())


def test_nan_of_plain_torch_does_not_widen_the_limit() -> None:
    plain = torch.full_like(EXACT, math.nan)
    with pytest.raises(AssertionError, match="error of plain torch is 0"):
        assert_within_rule("o", EXACT.float() + 1e-3, EXACT, plain.float())


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError, match=r"shape \(1, 4\), expected \(2, 2\)"):
        assert_within_rule("o", EXACT.reshape(1, 4), EXACT, EXACT)
    assert_within_rule("o", EXACT[:0], EXACT[:0], EXACT[:0])


def test_a_large_lse_widens_the_band() -> None:
    plain = rounding_band(EXACT, torch.float32)
    assert rounding_band(EXACT, torch.float32, lse=2.0) == plain
    ulp = torch.finfo(torch.float32).eps
    assert rounding_band(EXACT, torch.float32, lse=100.0) == pytest.approx((16 + 1600) * ulp)


def test_a_large_spread_of_the_terms_widens_the_band() -> None:
    plain, ulp = rounding_band(EXACT, torch.float32), torch.finfo(torch.float32).eps
    assert rounding_band(EXACT, torch.float32, spread=32.0) == plain
    assert rounding_band(EXACT, torch.float32, spread=50.0) == pytest.approx(plain + 18 * ulp)


def test_terms_widen_the_band_only_if_the_result_cancels() -> None:
    ulp, zero = torch.finfo(torch.float32).eps, torch.zeros(2, dtype=torch.float64)
    assert rounding_band(zero, torch.float32, terms=200.0) == pytest.approx(100 * ulp)
    assert rounding_band(zero, torch.float32, terms=2.0) == rounding_band(zero, torch.float32)
    plain = rounding_band(EXACT, torch.float32)
    assert rounding_band(EXACT, torch.float32, terms=200.0) == plain
