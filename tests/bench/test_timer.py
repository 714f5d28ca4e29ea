"""The timer, and the clocks with a simulated device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from transformer_kernels.bench import Budget, Interleaver, Ratio, timer
from transformer_kernels.bench.timer import SLOW_ROUNDS, Seconds
from transformer_kernels.bench.workload import Prepare, Workload

CPU = torch.device("cpu")


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


class Device:
    """A simulated asynchronous clock: times are known only after `wait`."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self._pending: dict[str, float | None] = {}

    def lap(self, workload: Workload) -> Seconds:
        name = str(workload())
        self.ran.append(name)
        self._pending[name] = None

        def seconds() -> float:
            known = self._pending[name]
            assert known is not None, f"the time of {name} was read too early"
            return known

        return seconds

    def wait(self) -> None:
        self.ran.append("wait")
        self._pending = {name: float(ord(name)) for name in self._pending}


def test_all_laps_of_a_round_start_before_any_time_is_read() -> None:
    device = Device()

    def prepare(name: str) -> Callable[[], Workload]:
        return lambda: lambda: name

    interleaver = Interleaver({name: prepare(name) for name in "abc"}, clock=device)
    interleaver.warm_up()
    assert "".join(device.ran) == "waitabcwait"
    device.ran.clear()
    interleaver.round()
    interleaver.round()
    assert "".join(device.ran) == "abcwait" + "bcawait"
    medians = [timing.median_ms for timing in interleaver.timings().values()]
    assert medians == pytest.approx([1e3 * ord(name) for name in "abc"])


class Event:
    log: list[str]
    """calls on the device, shared with the test"""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: str) -> None:
        self.log.append(f"record on {stream}")

    def elapsed_time(self, _end: Event) -> float:
        return 2.5


def test_a_lap_on_a_device_is_between_events_after_the_flush(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    monkeypatch.setattr(Event, "log", log, raising=False)
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: log.append(f"wait for {device}"))
    monkeypatch.setattr(timer, "FLUSH_BYTES", 8)
    monkeypatch.setattr(torch.Tensor, "zero_", lambda x: log.append(f"flush {x.numel()}"))
    clock = timer.CudaClock(CPU)
    seconds = clock.lap(lambda: log.append("work"))
    assert log == ["flush 8", "record on the stream of cpu", "work", "record on the stream of cpu"]
    clock.wait()
    assert log[-1] == "wait for cpu"
    assert seconds() == pytest.approx(2.5e-3)


def test_the_clock_depends_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(timer.clock_for(CPU), timer.CpuClock)
    made: list[torch.device] = []
    monkeypatch.setattr(timer, "CudaClock", made.append)
    timer.clock_for(torch.device("cuda:1"))
    assert made == [torch.device("cuda:1")]
