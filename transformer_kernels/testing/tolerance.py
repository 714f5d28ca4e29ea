"""The one rule for errors, against float64 and relative to what plain torch achieves."""

from __future__ import annotations

import torch
from torch import Tensor


def rounding_band(exact: Tensor, dtype: torch.dtype) -> float:
    """The error that rounding alone explains: 2 ulp of storage and 32 of accumulation.

    - Two units in the last place of `dtype` at the tensor's largest value: one for the result, one
      for an operand that was stored in `dtype` before (o inside delta, for instance).
    - 32 units of the accumulation dtype (float32; float64 for float64) at 1: where terms cancel,
      as in dp - delta for a row that sees one key, the result is exactly 0 and the sums that lead
      to it are not. Test inputs are standard normal: these sums of 16 terms are some units large.

    For float64 the oracle is no better than what it judges: sums of some hundred terms in another
    order differ from it by more than two units, and all is 8 times as wide.
    """
    largest = _largest(exact.masked_fill(~exact.isfinite(), 0.0))
    if dtype == torch.float64:
        return 8 * torch.finfo(dtype).eps * (2 * largest + 32)
    return 2 * torch.finfo(dtype).eps * largest + 32 * torch.finfo(torch.float32).eps


def assert_within_rule(name: str, got: Tensor, exact: Tensor, plain: Tensor) -> None:
    """|got - exact| <= 2 |plain - exact| + a rounding band, each the largest of its tensor.

    Args:
        name: of the tensor, for the message.
        got: what is tested.
        exact: the same in float64, from the very same (rounded) inputs.
        plain: the same by plain torch in got's dtype.

    inf and nan must stand where `exact`, rounded to got's dtype, has them.
    """
    if got.shape != exact.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
    _assert_same_positions(name, got, exact.to(got.dtype))
    finite = got.isfinite()
    error = _largest((got.double() - exact).masked_fill(~finite, 0.0))
    yardstick = _largest((plain.double() - exact).masked_fill(~(finite & plain.isfinite()), 0.0))
    band = rounding_band(exact, got.dtype)
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
