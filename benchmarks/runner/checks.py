"""Checks before timing, and the contenders of what has passed them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.runner.ceilings import has_fast_products
from benchmarks.runner.record import case_id
from benchmarks.runner.run import Comparison, Measurement, Run
from transformer_kernels.bench import Attend, Case, Direction, Inputs, Variant, prepare_work
from transformer_kernels.bench.contenders import CheckedCase, Contender, check
from transformer_kernels.bench.workload import Prepare

SLOW_SCORES = 2**24
"""With as many scores, naive attention takes many seconds a call where products are slow."""
BOUND = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 0.02}
"""Largest difference of two implementations, relative to the largest value."""


@dataclass(frozen=True, kw_only=True)
class Sizes(Case):
    """Sizes of a workload that is not one call of attention, or whose mask differs by head."""

    mask_name: str = ""
    share: float = math.nan
    """visible fraction of the M x N pairs; NaN: unknown, with the operations and the bytes"""

    @cached_property
    def visible(self) -> float:
        return self.share

    def operations(self, direction: Direction) -> float:
        return math.nan if math.isnan(self.share) else super().operations(direction)

    def traffic(self, direction: Direction) -> float:
        return math.nan if math.isnan(self.share) else super().traffic(direction)


def causal_sizes(name: str, *, H: int, S: int, dtype: torch.dtype) -> Sizes:
    """Causal self-attention of any length: the mask is not materialized to count its pairs."""
    return Sizes(
        name=name, H_q=H, H_kv=H, M=S, N=S, dtype=dtype, mask_name="causal", share=(S + 1) / (2 * S)
    )


def relative_error(name: str, got: Tensor, expected: Tensor, bound: float) -> float:
    """Returns the largest difference, relative to the largest value.

    Raises:
        AssertionError: it is larger than the bound, or NaN.
    """
    wanted = expected.detach().double()
    error = float((got.detach().double() - wanted).abs().max() / wanted.abs().max())
    assert error <= bound, f"{name}: error {error:.1e} of the largest value, bound {bound:g}"
    return error


def checked_calls(
    case: Case, direction: Direction, calls: Mapping[str, Prepare], bound: float
) -> list[Contender]:
    """Runs every call once and returns contenders: the result of each must be that of the first.

    Args:
        case: columns of the rows.
        direction: likewise.
        calls: set-ups by variant; a call returns a tensor.
        bound: see `relative_error`.

    Raises:
        AssertionError: a result is wrong.
    """
    expected: Tensor | None = None
    contenders = []
    for name, prepare in calls.items():
        got = prepare()()
        assert isinstance(got, Tensor)
        got = got.detach().clone()
        expected = got if expected is None else expected
        error = relative_error(f"{case.name}, {case.dtype_name}, {name}", got, expected, bound)
        contenders.append(Contender(case, direction, name, prepare, error))
    return contenders


def attention_contenders(
    case: Case,
    direction: Direction,
    attends: Mapping[str, Attend],
    inputs: Inputs,
    errors: Mapping[str, float],
    learned: Mapping[str, Sequence[Tensor]] | None = None,
) -> list[Contender]:
    """Returns contenders of attention functions that are already checked.

    Args:
        case: columns of the rows.
        direction: what to time.
        attends: functions by variant; they may ignore an input.
        inputs: q, k, v and do.
        errors: by variant; NaN where it has none.
        learned: further tensors to differentiate, by variant.
    """
    return [
        Contender(
            case,
            direction,
            name,
            prepare_work(attend, inputs, direction, (learned or {}).get(name, ()), may_ignore=True),
            errors.get(name, math.nan),
        )
        for name, attend in attends.items()
    ]


def projected_inputs(case: Case) -> Inputs:
    """Inputs of a case as heads of one projection: (B, S, H, D), transposed."""
    return Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in case.inputs()))


def compared(case: Case, directions: Sequence[Direction]) -> Comparison:
    """Returns the comparison of all chosen variants on a case."""

    def measurements(run: Run) -> Iterator[Measurement]:
        checked = check_quickly(case, run.usable())
        for direction in directions:
            yield run.timed(checked.contenders(direction))

    return Comparison(name=case_id(case), measurements=measurements)


def check_quickly(case: Case, variants: Sequence[Variant]) -> CheckedCase:
    """Checks a case; without naive attention, and at a shorter length, where that is slow.

    In half precision on a CPU whose products in it are slow, a case with SLOW_SCORES or more is
    checked at half its length, or a quarter and so on. Its mask must not depend on the length.
    """
    length = case.N
    if not has_fast_products(case.dtype):
        while case.B * case.H_q * length**2 >= SLOW_SCORES:
            length //= 2
    return check(case, list(variants)) if length == case.N else check_at(length, case, variants)


def check_at(length: int, case: Case, variants: Sequence[Variant]) -> CheckedCase:
    """Checks a case at a shorter length.

    Args:
        length: number of queries and keys of the check.
        case: the case. Its mask must not depend on the length.
        variants: variants to check.

    Returns:
        The case at its own length, without naive attention, with the errors of the shorter one.
    """
    bias = None if case.bias is None else case.bias[..., :length, :length]
    shorter = check(replace(case, M=length, N=length, bias=bias), list(variants))
    attends = {one.name: one.attend_for(case) for one in variants if one.name != "naive"}
    return replace(shorter, case=case, inputs=case.inputs(), attends=attends)
