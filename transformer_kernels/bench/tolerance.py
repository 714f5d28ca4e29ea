"""Tolerance rules of all tests: an error against float64, and a difference of two algorithms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def rounding_band(
    exact: Tensor,
    dtype: torch.dtype,
    *,
    lse: float = 0.0,
    terms: float = 0.0,
    spread: float = 0.0,
    stored: float = 0.0,
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
      Mary 2019, A New Approach to Probabilistic Rounding Error Analysis). In half precision delta
      has a larger error, because it is computed from o as it is stored: half an ulp of `dtype` in
      each product do o. The same bound applies to the root of the sum of the squares of p do o.
      The error of plain torch is no bound here: a table has few elements, and the same sum of
      random errors may be near zero.

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
        stored: largest root of the sum of squares of p do o, for the gradient of a table.

    Returns:
        The allowed absolute error.
    """
    largest = _largest(exact.masked_fill(~exact.isfinite(), 0.0))
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    ulp = torch.finfo(accumulation).eps
    cancelled = terms / 2 if largest < terms / 2 * ulp else 0.0
    ulps = max(32.0, 2.0 * lse * largest, cancelled, spread)
    storage = 2 * largest + (stored if dtype != accumulation else 0.0)
    band = storage * torch.finfo(dtype).eps + ulps * ulp
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
    stored: float = 0.0,
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
        stored: as for `rounding_band`.

    Raises:
        AssertionError: the shape, the positions of inf or nan, or the error are wrong.
    """
    if got.shape != exact.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
    _assert_same_positions(name, got, exact.to(got.dtype))
    finite = got.isfinite()
    error, where = _largest_difference(got, exact, finite)
    plain_error, _ = _largest_difference(plain, exact, finite & plain.isfinite())
    band = rounding_band(exact, got.dtype, lse=lse, terms=terms, spread=spread, stored=stored)
    if error > 2 * plain_error + band:
        raise AssertionError(
            f"{name} ({got.dtype}): error {error:.3g} at {where}: got {got[where]:.9g}, expected "
            f"{exact[where]:.9g} (float64). The error of plain torch is {plain_error:.3g}; allowed "
            f"is 2 x that + {band:.3g} for rounding"
        )


def assert_same_function(
    got: Any, other: Any, *, dtype: torch.dtype | None = None, lse: float = 0.0
) -> None:
    """Asserts max |got - other| <= 6 rounding bands: two algorithms computed the same function.

    The bound follows from the tolerance rule.

    - Each algorithm satisfies the rule: |x - exact| <= 2 |plain - exact| + band.
    - The error of plain torch is rounding, too: |plain - exact| <= band.
    - Each result is therefore within 3 bands of the exact one. The two differ by at most 6 bands.

    The band is `rounding_band(other, dtype)`. inf and nan must be at the positions where `other`,
    rounded to got's dtype, has them.

    Args:
        got: the result of one algorithm: a tensor, or nested sequences and mappings of tensors.
        other: the result of the other one, with the same structure and shapes.
        dtype: the narrowest dtype in which either algorithm computed. It must be given if the
            dtypes of the results differ or do not tell, as after autocast; default: their dtype.
        lse: as for `rounding_band`.

    Raises:
        AssertionError: the structure, a shape or dtype, the positions of inf or nan, or the
            difference are wrong.
    """
    for name, x, y in _pairs("result", got, other):
        if x.shape != y.shape:
            raise AssertionError(f"{name}: shape {tuple(x.shape)}, expected {tuple(y.shape)}")
        if dtype is None and x.dtype != y.dtype:
            raise AssertionError(f"{name}: {x.dtype}, expected {y.dtype} (or dtype must be given)")
        _assert_same_positions(name, x, y.to(x.dtype))
        finite = x.isfinite()
        difference, where = _largest_difference(x, y, finite)
        allowed = 6 * rounding_band(y.masked_fill(~finite, 0.0), dtype or y.dtype, lse=lse)
        if difference > allowed:
            raise AssertionError(
                f"{name} ({dtype or y.dtype}): the two algorithms differ by {difference:.3g} at "
                f"{where}: got {x[where]:.9g}, the other {y[where]:.9g}. Allowed is {allowed:.3g}, "
                f"6 rounding bands"
            )


def _pairs(name: str, got: Any, other: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    if isinstance(got, Tensor) and isinstance(other, Tensor):
        yield name, got.detach(), other.detach()
    elif isinstance(got, Mapping) and isinstance(other, Mapping):
        if got.keys() != other.keys():
            raise AssertionError(f"{name}: keys {list(got)}, expected {list(other)}")
        for key, x in got.items():
            yield from _pairs(f"{name}[{key!r}]", x, other[key])
    elif isinstance(got, Sequence) and isinstance(other, Sequence):
        if len(got) != len(other):
            raise AssertionError(f"{name}: {len(got)} elements, expected {len(other)}")
        for i, x in enumerate(got):
            yield from _pairs(f"{name}[{i}]", x, other[i])
    else:
        raise AssertionError(f"{name}: {type(got).__name__}, expected {type(other).__name__}")


def _assert_same_positions(name: str, got: Tensor, exact: Tensor) -> None:
    tests = {"nan": torch.isnan, "+inf": torch.isposinf, "-inf": torch.isneginf}
    for value, test in tests.items():
        differ = (test(got) != test(exact)).nonzero()
        if len(differ):
            raise AssertionError(
                f"{name}: {value} is misplaced at {len(differ)} positions, first "
                f"{tuple(differ[0].tolist())}: got {got[tuple(differ[0])]}, "
                f"expected {exact[tuple(differ[0])]}"
            )


def _largest_difference(x: Tensor, y: Tensor, where: Tensor) -> tuple[float, tuple[int, ...]]:
    """Returns the largest |x - y| among the elements marked in `where`, and its position."""
    if x.numel() == 0:
        return 0.0, ()
    difference = (x.double() - y.double()).masked_fill(~where, 0.0).abs().detach()
    worst = torch.unravel_index(difference.argmax(), difference.shape)
    return float(difference.max()), tuple(int(i) for i in worst)


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0
