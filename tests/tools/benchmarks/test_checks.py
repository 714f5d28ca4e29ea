from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.runner import checks
from benchmarks.runner.checks import (
    Sizes,
    causal_sizes,
    check_at,
    check_quickly,
    checked_calls,
    relative_error,
)
from transformer_kernels.bench import Case, usable_variants
from transformer_kernels.bench.contenders import check
from transformer_kernels.masks.mask import Mask

CASE = Case(
    name="", H_q=2, H_kv=2, M=40, N=40, D=8, D_v=8, mask=Mask.causal(), dtype=torch.bfloat16
)


@pytest.mark.parametrize(
    ("fast", "slow_scores", "checked", "variants"),
    [
        (False, 3201, 40, ["naive", "sdpa"]),
        (False, 3200, 20, ["sdpa"]),
        (False, 800, 10, ["sdpa"]),
        (True, 3200, 40, ["naive", "sdpa"]),
    ],
)
def test_large_cases_are_checked_at_a_shorter_length_where_products_are_slow(
    fast: bool,
    slow_scores: int,
    checked: int,
    variants: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "SLOW_SCORES", slow_scores)
    monkeypatch.setattr(checks, "has_fast_products", lambda _: fast)
    ready = check_quickly(CASE, usable_variants(["naive", "sdpa"]))
    assert ready.expected.exact.o.shape[-2] == checked
    assert [one.variant for one in ready.contenders("fwd")] == variants
    assert ready.inputs.q.shape == (1, 2, 40, 8)


def test_the_case_runs_at_its_own_length_with_the_errors_of_the_shorter_one() -> None:
    bias = torch.randn(1, 2, 40, 40, dtype=torch.bfloat16)
    case = replace(CASE, bias=bias)
    variants = usable_variants(["naive", "cpu"])
    (contender,) = check_at(16, case, variants).contenders("fwd")
    shorter = replace(case, M=16, N=16, bias=bias[..., :16, :16])
    expected = {one.variant: one.error for one in check(shorter, variants).contenders("fwd")}
    assert contender.error == expected["cpu"]
    assert contender.case is case
    contender.prepare()()


def test_an_error_beyond_the_bound_or_nan_stops_before_timing() -> None:
    x = torch.tensor([1.0, 4.0])
    assert relative_error("", x + 0.2, x, 0.051) == pytest.approx(0.05)
    for wrong in (x + 0.2, x * torch.nan):
        with pytest.raises(AssertionError, match="of the largest value"):
            relative_error("", wrong, x, 0.049)
        calls = {name: lambda y=y: lambda: y for name, y in (("sdpa", x), ("cpu", wrong))}
        with pytest.raises(AssertionError, match="a model, float32, cpu: error"):
            checked_calls(Sizes(name="a model", M=2, N=2), "fwd", calls, 0.049)


def test_a_workload_of_more_than_one_call_has_no_rates() -> None:
    step = Sizes(name="", M=4, N=4)
    assert math.isnan(step.visible)
    assert math.isnan(step.operations("step"))
    assert math.isnan(step.traffic("step"))
    causal = replace(CASE, dtype=torch.float32)
    sizes = causal_sizes("", H=2, S=40, dtype=torch.float32)
    assert sizes.visible == causal.visible
    assert replace(sizes, D=8, D_v=8).operations("fwd") == causal.operations("fwd")
