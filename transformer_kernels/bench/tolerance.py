"""The one rule for errors, against float64 and relative to what plain torch achieves."""

from __future__ import annotations

import torch
from torch import Tensor


def rounding_band(
    exact: Tensor, dtype: torch.dtype, *, lse: float = 0.0, terms: float = 0.0
) -> float:
    """The error of a tensor that rounding alone explains.

    It depends on the largest value of the tensor, and has two parts: storage in `dtype`, and
    accumulation in float32 (in float64 for float64).

    - Storage: two units in the last place (ulp) of `dtype` at the largest value. One is for the
      result, one for an operand that was stored in `dtype` before, such as o inside delta.
    - Accumulation: 32 ulp of the accumulation dtype at 1. Inputs are standard normal, and sums of
      16 of their products err by a few ulp at 1. Where a row sees one key, dp - delta is exactly
      zero and its two sums are not.

    Two effects can make the second part larger. Their size in plain torch depends on how a CPU's
    matrix library orders its sums, so they are bounded here.

    - Weights are exp(s - lse), so absolute errors of s and lse are relative errors of the weights
      and of all that is summed with them. Both are sums, and one ulp at the size of lse is allowed
      for each: 2 |lse| ulp at the largest value.
    - A gradient may cancel to zero as a whole and still be a sum of large terms: with identical
      keys dk sums p (dp - delta) q over all queries, and every dp equals its delta. Rounding dp and
      delta once each changes that sum by up to half an ulp of the sum of the terms' magnitudes
      (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 4.2). A result
      below this bound holds roundings and nothing else.

    The float64 oracle rounds like what it judges: sums of several hundred terms in another order
    differ by more than two ulp, so the band for float64 is 8 times as wide.

    Args:
        exact: the exact result.
        dtype: dtype of the result under test.
        lse: the largest magnitude of a log-sum-exp (natural log) that the weights were computed
            with; 0 where there are none.
        terms: the largest sum of the magnitudes of the terms that an element is a sum of, from
            `gradient_terms`; 0 for results that do not cancel.
    """
    largest = _largest(exact.masked_fill(~exact.isfinite(), 0.0))
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    ulp = torch.finfo(accumulation).eps
    ulps = max(32.0, 2.0 * lse * largest, terms / 2 if largest < terms / 2 * ulp else 0.0)
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
) -> None:
    """|got - exact| <= 2 |plain - exact| + a rounding band, each the largest of its tensor.

    Args:
        name: of the tensor, for the message.
        got: what is tested.
        exact: the same in float64, from the very same (rounded) inputs.
        plain: the same by plain torch in got's dtype.
        lse: as for `rounding_band`.
        terms: as for `rounding_band`.

    inf and nan must stand where `exact`, rounded to got's dtype, has them.
    """
    if got.shape != exact.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
    _assert_same_positions(name, got, exact.to(got.dtype))
    finite = got.isfinite()
    error = _largest((got.double() - exact).masked_fill(~finite, 0.0))
    yardstick = _largest((plain.double() - exact).masked_fill(~(finite & plain.isfinite()), 0.0))
    band = rounding_band(exact, got.dtype, lse=lse, terms=terms)
    if error > 2 * yardstick + band:
        worst = (got.double() - exact).masked_fill(~finite, 0.0).abs().flatten().argmax()
        where = tuple(int(i) for i in torch.unravel_index(worst, got.shape))
        raise AssertionError(
            f"{name} ({got.dtype}): error {error:.3g} at {where}, where it is {got[where]:.9g} and "
            f"float64 says {exact[where]:.9g}. Plain torch errs by {yardstick:.3g}; allowed are "
            f"2 x that + {band:.3g} for rounding"
        )


def _assert_same_positions(name: str, got: Tensor, exact: Tensor) -> None:
    tests = {"nan": torch.isnan, "+inf": torch.isposinf, "-inf": torch.isneginf}
    for value, test in tests.items():
        differ = (test(got) != test(exact)).nonzero()
        if len(differ):
            raise AssertionError(
                f"{name}: {value} is misplaced at {len(differ)} positions, first "
                f"{tuple(differ[0].tolist())}: got {got[tuple(differ[0])]}, "
                f"float64 says {exact[tuple(differ[0])]}"
            )


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0
