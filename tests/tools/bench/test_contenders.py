from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.tools.bench.example import PROVENANCE
from transformer_kernels.bench import Budget, Case, Variant, usable_variants
from transformer_kernels.bench.contenders import Contender, Expected, check, measure_contenders
from transformer_kernels.masks.mask import Mask

CASE = Case(name="causal", H_q=2, H_kv=2, M=16, N=16, D=8, D_v=8, mask=Mask.causal())


def wrong_by(relative: float) -> Variant:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = right(q, k, v) * (1.0 + relative)
        return o

    (naive,) = usable_variants(["naive"])
    right = naive.attend_for(CASE)
    return Variant("wrong", "wrong", lambda _case: attend)


def test_correct_variants_pass_and_their_outputs_are_kept() -> None:
    checked = check(CASE, usable_variants(["naive", "sdpa"]))
    assert list(checked.attends) == list(checked.outputs) == ["naive", "sdpa"]


def test_a_wrong_variant_is_an_error_before_any_timing() -> None:
    naive = usable_variants(["naive"])
    check(CASE, [*naive, wrong_by(0.0)])
    with pytest.raises(AssertionError, match="wrong, causal: o"):
        check(CASE, [*naive, wrong_by(1e-4)])


def test_a_wrong_bias_gradient_is_an_error() -> None:
    bias = torch.randn(1, 2, 16, 16, requires_grad=True)
    case = replace(CASE, bias=bias)
    (naive,) = usable_variants(["naive"])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        doubled = 2.0 * bias - bias.detach()
        return naive.attend_for(replace(case, bias=doubled))(q, k, v)

    with pytest.raises(AssertionError, match="wrong, causal: dbias"):
        check(case, [naive, Variant("wrong", "wrong", lambda _case: attend)])


def test_given_expected_outputs_are_compared_with() -> None:
    expected = check(CASE, usable_variants(["naive"])).expected
    sdpa = usable_variants(["sdpa"])
    assert list(check(CASE, sdpa, expected).outputs) == ["sdpa"]
    other = Expected(*(of._replace(dv=of.dv + 1.0) for of in (expected.exact, expected.naive)))
    with pytest.raises(AssertionError, match="sdpa, causal: dv"):
        check(CASE, sdpa, other)


@pytest.mark.quick
def test_contenders_are_interleaved_and_each_has_its_row() -> None:
    calls = []

    def contender(variant: str, **more: int) -> Contender:
        def workload() -> None:
            calls.append(variant)

        return Contender(
            case=CASE, direction="fwd", variant=variant, prepare=lambda: workload, error=0.5, **more
        )

    def repeat(round_: Callable[[], None], rounds: int) -> None:
        calls.clear()
        for _ in range(rounds):
            round_()

    measured = measure_contenders(
        [contender("cpu"), contender("one", threads=1), contender("naive", most_rounds=1)],
        provenance=PROVENANCE,
        suite="cpu",
        budget=Budget(0.0, fewest=2),
        repeat=repeat,
    )
    assert calls == ["cpu", "one", "naive", "one", "cpu"]
    assert [len(one.laps) for one in measured] == [2, 2, 1]
    rows = [one.row for one in measured]
    assert [(row.variant, row.threads, row.error, row.suite) for row in rows] == [
        ("cpu", 2, 0.5, "cpu"),
        ("one", 1, 0.5, "cpu"),
        ("naive", 2, 0.5, "cpu"),
    ]


def test_contenders_are_the_named_variants() -> None:
    checked = check(CASE, usable_variants(["naive", "sdpa"]))
    assert [c.variant for c in checked.contenders("fwd")] == ["naive", "sdpa"]
    assert [c.variant for c in checked.contenders("fwd", ["sdpa"])] == ["sdpa"]
