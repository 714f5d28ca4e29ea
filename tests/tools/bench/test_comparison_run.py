from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.tools.bench.comparison_example import CALL
from tests.tools.bench.example import PROVENANCE
from transformer_kernels.bench import Attend, Budget, Case, Variant, usable_variants
from transformer_kernels.bench.comparison import calls, run
from transformer_kernels.bench.comparison.calls import Call, Shape
from transformer_kernels.bench.comparison.run import compare, measure_call
from transformer_kernels.bench.limits import Limits
from transformer_kernels.bench.steadiness import Speed

SHORT = Budget(0.0, fewest=2)
CALM = Speed(1.0, 1.0)
SMALL = replace(CALL, name="small", shape=Shape.parse("2,4,2,6,9,8"), dtype=torch.float32)


def test_every_variant_has_a_row_for_each_direction() -> None:
    result = measure_call(SMALL, usable_variants(["naive", "sdpa", "cpu"]), SHORT, PROVENANCE)
    assert [(one.row.direction, one.row.variant) for one in result.measured] == [
        (direction, variant)
        for direction in ("fwd", "fwd+bwd")
        for variant in ("naive", "sdpa", "cpu")
    ]
    for one in result.measured:
        assert (one.row.case, one.row.suite, one.row.mask) == ("small", "bench", "causal")
        assert (one.row.B, one.row.H_q, one.row.H_kv, one.row.M, one.row.N) == (2, 4, 2, 6, 9)
        assert one.row.visible == (4 + 5 + 6 + 7 + 8 + 9) / 54
        assert 0.0 < one.row.error < 1e-5
        assert len(one.laps) == 2
    assert (result.skipped, result.broken, result.checked_tokens) == ({}, {}, 9)


def test_long_sequences_are_checked_at_a_shorter_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are those of the whole call."""
    monkeypatch.setattr(calls, "CHECKED_PAIRS", 10)
    call = replace(SMALL, shape=Shape.parse("2,4,2,16,16,8"), mask="document:5,11")
    assert call.checked_case().M == call.checked_case().N == 2
    lengths = []

    def spy(case: Case) -> Attend:
        (sdpa,) = usable_variants(["sdpa"])
        attend = sdpa.attend_for(case)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            lengths.append(q.shape[2])
            return attend(q, k, v)

        return call

    variant = replace(usable_variants(["sdpa"])[0], attend_for=spy)
    result = measure_call(call, [variant], SHORT, PROVENANCE)
    assert lengths[:2] == [2, 16]
    assert {*lengths[2:]} == {16}
    assert result.checked_tokens == 2
    assert {one.row.N for one in result.measured} == {16}


def failing_at(length: int, *, is_peer: bool) -> Variant:
    def attend_for(case: Case) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if q.shape[2] == length:
                raise RuntimeError("out of memory")
            return right(q, k, v)

        (sdpa,) = usable_variants(["sdpa"])
        right = sdpa.attend_for(case)
        return attend

    return replace(usable_variants(["cpu"])[0], attend_for=attend_for, is_peer=is_peer)


@pytest.mark.usefixtures("without_memory")
@pytest.mark.parametrize("length", [4, 16])
@pytest.mark.parametrize("is_peer", [True, False])
def test_variant_that_fails_is_named(
    length: int, is_peer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the check, or at the call's own length."""
    monkeypatch.setattr(calls, "CHECKED_PAIRS", 16)
    call = replace(SMALL, shape=Shape.parse("1,2,2,16,16,8"))
    variants = [failing_at(length, is_peer=is_peer), *usable_variants(["sdpa"])]
    result = measure_call(call, variants, SHORT, PROVENANCE)
    assert {one.row.variant for one in result.measured} == {"sdpa"}
    named = {"cpu": "out of memory"}
    assert (result.skipped, result.broken) == ((named, {}) if is_peer else ({}, named))


@pytest.mark.usefixtures("without_memory")
def test_naive_attention_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "too_large_reason", lambda _case: "too large")
    result = measure_call(SMALL, usable_variants(["naive", "sdpa"]), SHORT, PROVENANCE)
    assert {one.row.variant for one in result.measured} == {"sdpa"}
    assert result.skipped == {"naive": "too large"}


@pytest.mark.usefixtures("without_memory")
def test_naive_attention_runs_in_few_rounds_where_it_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variants = usable_variants(["naive", "sdpa"])
    for slow, rounds in ((2 * 4 * 6 * 9, 3), (2 * 4 * 6 * 9 + 1, 7)):
        monkeypatch.setattr(run, "SLOW_SCORES", slow)
        monkeypatch.setattr(run, "NAIVE_ROUNDS", 3)
        result = measure_call(SMALL, variants, Budget(0.0, fewest=7), PROVENANCE)
        assert [len(one.laps) for one in result.measured] == [rounds, 7, rounds, 7]


@pytest.mark.usefixtures("without_memory")
def test_naive_attention_is_left_out_from_a_number_of_scores_on() -> None:
    """SMALL has 2 x 4 x 6 x 9 scores."""
    variants = usable_variants(["naive", "sdpa"])
    for most, names in ((433, {"naive", "sdpa"}), (432, {"sdpa"})):
        result = measure_call(SMALL, variants, SHORT, PROVENANCE, naive_scores=most)
        assert {one.row.variant for one in result.measured} == names
        assert ("fewer than 432 scores" in result.skipped.get("naive", "")) == (most == 432)


@pytest.mark.usefixtures("without_memory")
def test_naive_attention_alone_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where everything else failed, however slow it is; and nothing at all is no error."""
    monkeypatch.setattr(run, "SLOW_SCORES", 1)
    variants = [failing_at(6, is_peer=True), *usable_variants(["naive"])]
    result = measure_call(SMALL, variants, Budget(0.0, fewest=7), PROVENANCE)
    assert [(one.row.variant, len(one.laps)) for one in result.measured] == [("naive", 7)] * 2
    assert measure_call(SMALL, variants[:1], SHORT, PROVENANCE).measured == []


def test_disturbed_calls_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And limits are measured for each dtype."""
    speeds = iter([CALM, CALM, Speed(1.5, 1.0)])
    monkeypatch.setattr(run, "Probe", lambda _device: lambda: next(speeds, CALM))
    monkeypatch.setattr(run, "measure_limits", lambda dtype, _: Limits(dtype.itemsize, 1.0))
    log: list[Call] = []
    half = replace(SMALL, dtype=torch.bfloat16)
    found = compare(
        [SMALL, half], usable_variants(["cpu"]), budget=SHORT, tolerance=0.05, on_call=log.append
    )
    assert log == [SMALL, half, half]
    assert [call for call, _ in found.calls.results] == [SMALL, half]
    assert len(found.measured) == 4
    assert found.limits == {"float32": Limits(4, 1.0), "bfloat16": Limits(2, 1.0)}
