from __future__ import annotations

import pytest

from transformer_kernels.bench import Budget, Interleaver, Ratio
from transformer_kernels.bench.timer import SLOW_ROUNDS
from transformer_kernels.bench.workload import Prepare, Workload


class FakeClock:
    """A clock that only workloads advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def workload(self, name: str, *, seconds: list[float], setup: float = 0.0) -> Prepare:
        lasting = iter(seconds)

        def run() -> None:
            self.calls.append(name)
            self.now += next(lasting)

        def prepare() -> Workload:
            self.now += setup
            return run

        return prepare


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return FakeClock(monkeypatch)


def test_variants_are_interleaved_and_each_round_starts_with_another(clock: FakeClock) -> None:
    interleaver = Interleaver({name: clock.workload(name, seconds=[1.0] * 3) for name in "abc"})
    for _ in range(3):
        interleaver.round()
    assert "".join(clock.calls) == "abc" + "bca" + "cab"


def test_times_are_medians_and_quantiles_in_milliseconds(clock: FakeClock) -> None:
    laps = [0.004, 0.001, 0.005, 0.002, 0.003, 0.006]
    interleaver = Interleaver({"a": clock.workload("a", seconds=laps)})
    for _ in laps:
        interleaver.round()
    timing = interleaver.timings()["a"]
    assert timing.median_ms == pytest.approx(3.5)
    assert (timing.p20_ms, timing.p80_ms) == pytest.approx((2.0, 5.0))
    assert timing.rounds == 6


def test_set_up_is_not_timed(clock: FakeClock) -> None:
    interleaver = Interleaver({"a": clock.workload("a", seconds=[0.001], setup=10.0)})
    interleaver.round()
    assert interleaver.timings()["a"].median_ms == pytest.approx(1.0)


def test_warm_up_rounds_are_not_recorded(clock: FakeClock) -> None:
    interleaver = Interleaver({"a": clock.workload("a", seconds=[100.0, 1.0, 1.0])})
    timing = interleaver.run(Budget(seconds=0.0, fewest=2))["a"]
    assert timing.p80_ms == pytest.approx(1000.0)
    assert timing.rounds == 2


def test_slow_workloads_run_in_the_first_rounds_only(clock: FakeClock) -> None:
    workloads = {name: clock.workload(name, seconds=[1.0] * 5) for name in "ab"}
    interleaver = Interleaver(workloads, {"b": 2})
    assert interleaver.warm_up() == pytest.approx(1.0)  # only those that run in all rounds
    for _ in range(4):
        interleaver.round()
    assert "".join(clock.calls) == "a" + "ab" + "ba" + "a" + "a"
    assert [timing.rounds for timing in interleaver.timings().values()] == [4, 2]


def test_workloads_that_are_slow_during_warm_up_run_in_few_rounds(clock: FakeClock) -> None:
    laps = {"quick": [5.0] + [1.0] * 4, "slow": [5.1] + [6.0] * 2}
    interleaver = Interleaver({name: clock.workload(name, seconds=of) for name, of in laps.items()})
    assert interleaver.warm_up() == pytest.approx(5.0)
    for _ in range(4):
        interleaver.round()
    assert {name: one.rounds for name, one in interleaver.timings().items()} == {
        "quick": 4,
        "slow": SLOW_ROUNDS,
    }


def test_workloads_that_are_all_slow_run_in_all_rounds(clock: FakeClock) -> None:
    interleaver = Interleaver({name: clock.workload(name, seconds=[9.0] * 4) for name in "ab"})
    assert interleaver.warm_up() == pytest.approx(18.0)
    for _ in range(3):
        interleaver.round()
    assert [one.rounds for one in interleaver.timings().values()] == [3, 3]


def test_ratios_compare_laps_of_the_same_round(clock: FakeClock) -> None:
    """A machine that becomes slower changes the times, but not the ratios."""
    slower = [1.0, 2.0, 4.0, 8.0]
    laps = {"base": slower, "same": slower, "faster": [0.5 * x for x in slower]}
    interleaver = Interleaver({name: clock.workload(name, seconds=x) for name, x in laps.items()})
    for _ in slower:
        interleaver.round()
    ratios = interleaver.ratios("base")
    assert ratios == {"base": Ratio(1, 1, 1), "same": Ratio(1, 1, 1), "faster": Ratio(2, 2, 2)}


def test_ratios_have_quantiles_over_the_rounds(clock: FakeClock) -> None:
    laps = {"base": [3.0, 1.0, 6.0, 2.0, 5.0, 4.0], "other": [1.0] * 6}
    interleaver = Interleaver({name: clock.workload(name, seconds=x) for name, x in laps.items()})
    for _ in range(6):
        interleaver.round()
    ratio = interleaver.ratios("base")["other"]
    assert (ratio.median, ratio.p20, ratio.p80) == pytest.approx((3.5, 2.0, 5.0))


@pytest.mark.parametrize(("round_seconds", "rounds"), [(0.1, 30), (10.0, 5), (1e-4, 50), (0.0, 50)])
def test_the_number_of_rounds_of_a_budget_is_bounded(round_seconds: float, rounds: int) -> None:
    assert Budget(seconds=3.01, fewest=5, most=50).rounds(round_seconds) == rounds
