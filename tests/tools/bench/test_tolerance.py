"""The tolerance rules accept errors that rounding explains, and no others."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.tiers import each
from transformer_kernels.bench.tolerance import (
    assert_same_function,
    assert_within_rule,
    rounding_band,
)

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


@each("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_must_be_at_the_same_positions(value: float) -> None:
    with_value = EXACT.index_put((torch.tensor(1), torch.tensor(0)), torch.tensor(value).double())
    assert_within_rule("o", with_value.float(), with_value, with_value.float())
    assert_same_function(with_value, with_value)
    misplaced = r"misplaced at 1 positions, first \(1, 0\)"
    for got, other in ((with_value, EXACT), (EXACT, with_value)):
        with pytest.raises(AssertionError, match=misplaced):
            assert_within_rule("o", got.float(), other, EXACT.float())
        with pytest.raises(AssertionError, match=misplaced):
            assert_same_function(got, other)
    beyond = with_value.clone()
    beyond[0, 1] += 1e-9
    with pytest.raises(AssertionError, match=r"at \(0, 1\)"):
        assert_same_function(beyond, with_value)


def test_overflow_to_infinity_is_accepted() -> None:
    exact = torch.tensor([1e5, 1.0], dtype=torch.float64)
    assert_within_rule("o", exact.half(), exact, exact.half())
    other = exact.float()
    assert_same_function(other.half(), other, dtype=torch.float16)
    with pytest.raises(AssertionError, match=r"at \(1,\)"):
        assert_same_function(other.half() + 0.1, other, dtype=torch.float16)


def test_nan_of_plain_torch_does_not_widen_the_limit() -> None:
    plain = torch.full_like(EXACT, math.nan)
    with pytest.raises(AssertionError, match="error of plain torch is 0"):
        assert_within_rule("o", EXACT.float() + 1e-3, EXACT, plain.float())


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError, match=r"shape \(1, 4\), expected \(2, 2\)"):
        assert_within_rule("o", EXACT.reshape(1, 4), EXACT, EXACT)
    assert_within_rule("o", EXACT[:0], EXACT[:0], EXACT[:0])


ZERO = torch.zeros(2, dtype=torch.float64)
ULP, HALF_ULP = (torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16))


@each(
    ("exact", "dtype", "options", "wider_by"),
    [
        (EXACT, torch.float32, {"lse": 2.0}, 0.0),
        (EXACT, torch.float32, {"lse": 100.0}, (1600 - 32) * ULP),
        (EXACT, torch.float32, {"spread": 32.0}, 0.0),
        (EXACT, torch.float32, {"spread": 50.0}, 18 * ULP),
        (EXACT, torch.bfloat16, {"stored": 3.0}, 3 * HALF_ULP),
        (EXACT, torch.float32, {"stored": 3.0}, 0.0),
        (ZERO, torch.float32, {"terms": 200.0}, (100 - 32) * ULP),
        (ZERO, torch.float32, {"terms": 2.0}, 0.0),
        (EXACT, torch.float32, {"terms": 200.0}, 0.0),  # the result does not cancel
    ],
)
def test_what_widens_the_band(
    exact: torch.Tensor, dtype: torch.dtype, options: dict[str, float], wider_by: float
) -> None:
    plain = rounding_band(exact, dtype)
    assert rounding_band(exact, dtype, **options) == (
        pytest.approx(plain + wider_by) if wider_by else plain
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_two_algorithms_differ_by_at_most_six_bands(dtype: torch.dtype) -> None:
    """Both signs, at an element that is not the largest."""
    other = EXACT.to(dtype)
    allowed = 6 * rounding_band(other, dtype)
    wide = other.double()  # bfloat16 cannot represent a value just beyond the bound
    for sign in (1, -1):
        inside, beyond = wide.clone(), wide.clone()
        inside[0, 0] += 0.99 * sign * allowed
        beyond[0, 0] += 1.01 * sign * allowed
        assert_same_function(inside, other, dtype=dtype)
        with pytest.raises(AssertionError, match=r"differ by .* at \(0, 0\): got .* the other 1\."):
            assert_same_function(beyond, other, dtype=dtype)


def test_the_narrowest_dtype_sets_the_bound_of_two_algorithms() -> None:
    other = EXACT.float()
    got = other + 2 * torch.finfo(torch.bfloat16).eps * 8.0
    assert_same_function(got, other, dtype=torch.bfloat16)
    assert_same_function(got.bfloat16(), other, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match=r"result \(torch.float32\): .* 6 rounding bands"):
        assert_same_function(got, other)
    with pytest.raises(AssertionError, match=r"torch.bfloat16, expected torch.float32"):
        assert_same_function(got.bfloat16(), other)


def test_a_large_lse_widens_the_bound_of_two_algorithms() -> None:
    other = EXACT.float()
    got = other.double() + 5.9 * rounding_band(other, torch.float32, lse=100.0)
    assert_same_function(got, other, dtype=torch.float32, lse=100.0)
    with pytest.raises(AssertionError, match="differ by"):
        assert_same_function(got, other, dtype=torch.float32)


def test_each_tensor_of_a_structure_is_compared_with_its_own_band() -> None:
    small, large = EXACT.float(), 1e4 * EXACT.float()
    other = {"o": small, "gradients": (large, [small])}
    assert_same_function({"gradients": [large, (small,)], "o": small}, other)
    wrong = {"o": small, "gradients": (large, [small + 1e-3])}
    with pytest.raises(AssertionError, match=r"result\['gradients'\]\[1\]\[0\] .* differ by 0.001"):
        assert_same_function(wrong, other)


def test_structures_shapes_and_dtypes_of_two_algorithms_must_agree() -> None:
    x = EXACT.float()
    for got, other, message in (
        ([x], [x, x], "result: 1 elements, expected 2"),
        ({"o": x}, {"lse": x}, r"result: keys \['o'\], expected \['lse'\]"),
        ([x], x, "result: list, expected Tensor"),
        ([x[:1]], [x], r"result\[0\]: shape \(1, 2\), expected \(2, 2\)"),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_same_function(got, other)
    assert_same_function(x[:0], x[:0])
    assert_same_function(x[0, 0], x[0, 0])
