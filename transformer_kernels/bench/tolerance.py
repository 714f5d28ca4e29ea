"""Tolerance rule of all tests: the error against float64, relative to that of plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rounding_band(
    exact: Tensor,
    dtype: torch.dtype,
    *,
    lse: float = 0.0,
    terms: float = 0.0,
    spread: float = 0.0,
) -> float:
    """Returns the error of a tensor that rounding alone explains.

    The band depends on the largest value of the tensor. It has two parts: storage in `dtype`, and
    accumulation in float32 (float64 for float64).

    - Storage: two units in the last place (ulp) of `dtype` at the largest value. One is for the
      result, one for an operand stored in `dtype`, such as o inside delta.
    - Accumulation: 32 ulp of the accumulation dtype at 1. Inputs are standard normal, and sums of
      16 products err by a few ulp at 1. For a row with one visible key dp - delta is exactly zero,
      but its two sums are not.

    Three effects can increase the accumulation part. Their size in plain torch depends on the
    summation order of the CPU's matrix library, so they are bounded here.

    - Weights are exp(s - lse), so absolute errors of s and lse become relative errors of the
      weights and of everything computed from them. Both are sums; each is allowed one ulp at the
      size of lse: 2 |lse| ulp at the largest value.
    - A gradient may cancel to zero although its terms are large. With identical keys, dk sums
      p (dp - delta) q over all queries, and every dp equals its delta. Rounding dp and delta once
      changes that sum by up to half an ulp of the sum of the terms' magnitudes (Higham, Accuracy
      and Stability of Numerical Algorithms, 2nd edition, section 4.2). A result below this bound is
      rounding error only.
    - The gradient of a table sums ds = p (dp - delta) over all pairs at a distance, of both signs.
      Each term has errors of half an ulp of its size, independent of the others, so that the sum
      errs by half an ulp of the root of the sum of their squares; twice that is allowed (Higham and
      Mary 2019, A New Approach to Probabilistic Rounding Error Analysis).

    The float64 oracle rounds like a float64 result under test: sums of several hundred terms in
    another order differ by more than two ulp. The band for float64 is therefore 8 times as wide.

    Args:
        exact: the exact result.
        dtype: dtype of the result under test.
        lse: largest magnitude of the log-sum-exp (natural log) behind the weights; 0 if the result
            does not depend on weights.
        terms: largest sum of magnitudes of the terms of one element, from `gradient_terms`; 0 for
            results that do not cancel.
        spread: largest root of the sum of squares of such terms, for the gradient of a table.

    Returns:
        The allowed absolute error.
    """
    largest = _largest(exact.masked_fill(~exact.isfinite(), 0.0))
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    ulp = torch.finfo(accumulation).eps
    cancelled = terms / 2 if largest < terms / 2 * ulp else 0.0
    ulps = max(32.0, 2.0 * lse * largest, cancelled, spread)
    band = 2 * torch.finfo(dtype).eps * largest + ulps * ulp
    return 8 * band if dtype == torch.float64 else band


def assert_within_rule(
    name: str,
    got: Tensor,
    exact: Tensor,
    plain: Tensor,
    *,
    lse: float = 0.0,
    terms: float = 0.0,
    spread: float = 0.0,
) -> None:
    """Asserts max |got - exact| <= 2 max |plain - exact| + rounding band.

    inf and nan must be at the positions where `exact`, rounded to got's dtype, has them.

    Args:
        name: name of the tensor, for the message.
        got: the result under test.
        exact: the float64 result from the same (rounded) inputs.
        plain: the result of plain torch in got's dtype.
        lse: as for `rounding_band`.
        terms: as for `rounding_band`.
        spread: as for `rounding_band`.

    Raises:
        AssertionError: the shape, the positions of inf or nan, or the error are wrong.
    """
    if got.shape != exact.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
    _assert_same_positions(name, got, exact.to(got.dtype))
    finite = got.isfinite()
    error = _largest((got.double() - exact).masked_fill(~finite, 0.0))
    plain_error = _largest((plain.double() - exact).masked_fill(~(finite & plain.isfinite()), 0.0))
    band = rounding_band(exact, got.dtype, lse=lse, terms=terms, spread=spread)
    if error > 2 * plain_error + band:
        worst = (got.double() - exact).masked_fill(~finite, 0.0).abs().flatten().argmax()
        where = tuple(int(i) for i in torch.unravel_index(worst, got.shape))
        raise AssertionError(
            f"{name} ({got.dtype}): error {error:.3g} at {where}: got {got[where]:.9g}, expected "
            f"{exact[where]:.9g} (float64). The error of plain torch is {plain_error:.3g}; allowed "
            f"is 2 x that + {band:.3g} for rounding"
        )


def _assert_same_positions(name: str, got: Tensor, exact: Tensor) -> None:
    tests = {"nan": torch.isnan, "+inf": torch.isposinf, "-inf": torch.isneginf}
    for value, test in tests.items():
        differ = (test(got) != test(exact)).nonzero()
        if len(differ):
            raise AssertionError(
                f"{name}: {value} is misplaced at {len(differ)} positions, first "
                f"{tuple(differ[0].tolist())}: got {got[tuple(differ[0])]}, "
                f"expected {exact[tuple(differ[0])]} (float64)"
            )


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0
