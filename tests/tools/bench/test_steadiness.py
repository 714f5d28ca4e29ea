from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from transformer_kernels.bench.steadiness import Probe, Speed, Watch, measure_steadily

CALM, SLOW = Speed(1.0, 1.0), Speed(1.0, 1.2)


def probes(speeds: Iterable[Speed]) -> Watch:
    """A watch that sees these, then CALM."""
    left = iter(speeds)
    return Watch(lambda: next(left, CALM))


def log_of(speeds: Iterable[Speed], tries: int = 3) -> tuple[list[str], list[str], list[str]]:
    """Names of the measured items in order, of those with a result, of the disturbed ones."""
    log: list[str] = []

    def measure(name: str) -> int:
        log.append(name)
        return len(log)

    steady = measure_steadily("abc", measure, probes(speeds), tries=tries)
    for name, result in steady.results:
        assert log[result - 1] == name, "the last measurement counts"
        assert name not in log[result:]
    return log, [name for name, _ in steady.results], [one.item for one in steady.disturbed]


def test_calm_machine_measures_everything_once() -> None:
    assert log_of([]) == (["a", "b", "c"], ["a", "b", "c"], [])


@pytest.mark.parametrize(
    ("at", "again"), [(0, ["a"]), (1, ["a", "b"]), (2, ["b", "c"]), (3, ["c"])]
)
def test_disturbed_items_are_measured_again_after_the_others(at: int, again: list[str]) -> None:
    """A slow probe disturbs the items before and after it."""
    speeds = [SLOW if n == at else CALM for n in range(4)]
    assert log_of(speeds) == (["a", "b", "c", *again], ["a", "b", "c"], [])


def test_items_that_are_disturbed_in_every_try_are_named() -> None:
    speeds = [CALM, CALM, CALM, SLOW, CALM, SLOW, CALM, SLOW]
    assert log_of(speeds) == (["a", "b", "c", "c", "c"], ["a", "b"], ["c"])
    steady = measure_steadily("c", len, probes([CALM, CALM, SLOW]), tries=1, tolerance=0.1)
    assert steady.disturbed == []
    steady = measure_steadily("c", len, probes([CALM, SLOW]), tries=1, tolerance=0.1)
    assert [(one.item, round(one.slower, 3)) for one in steady.disturbed] == [("c", 0.2)]
    assert measure_steadily("c", len, probes([CALM, SLOW]), tolerance=0.25).disturbed == []


def test_machine_that_was_slow_from_the_start_is_noticed_later() -> None:
    """Items that were accepted are measured again when the machine turns out to be faster."""
    speeds = [SLOW, SLOW, SLOW, CALM, CALM]
    log, kept, disturbed = log_of(speeds)
    assert log[:3] == ["a", "b", "c"]
    assert {*log[3:]} == {"a", "b", "c"}
    assert (sorted(kept), disturbed) == (["a", "b", "c"], [])


def test_single_fast_probe_does_not_count() -> None:
    """A moment of turbo, in one of five probes or more."""
    speeds = [Speed(0.5, 0.5), *[CALM] * 8]
    steady = measure_steadily(range(8), float, probes(speeds))
    assert len(steady.results) == 8


def test_speed_of_earlier_measurements_counts() -> None:
    """A machine that is slow before, during and after a measurement."""
    watch = probes([CALM, CALM, SLOW, SLOW])
    assert measure_steadily("a", len, watch).disturbed == []
    assert len(measure_steadily("b", len, watch, tries=1).disturbed) == 1


def test_slower_part_counts() -> None:
    watch = probes([])
    watch.probe()
    assert watch.slowdown(Speed(1.1, 1.0)) == pytest.approx(0.1)
    assert watch.slowdown(CALM, Speed(0.9, 1.3)) == pytest.approx(0.3)


def test_probe_measures_a_product_and_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_kernels.bench.steadiness.SIDES", {"cpu": 32})
    monkeypatch.setattr("transformer_kernels.bench.steadiness.BYTES", {"cpu": 2**12})
    speed = Probe(torch.device("cpu"))()
    assert 0.0 < speed.product < 1.0
    assert 0.0 < speed.copy < 1.0
