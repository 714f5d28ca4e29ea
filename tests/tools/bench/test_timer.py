"""The timer, with workloads that advance a clock, and the clocks, with a simulated device."""

from __future__ import annotations

from typing import ClassVar

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
        self.calls = ""
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def workload(self, name: str, seconds: list[float], setup: float = 0.0) -> Prepare:
        lasting = iter(seconds)

        def run() -> None:
            self.calls += name
            self.now += next(lasting)

        def prepare() -> Workload:
            self.now += setup
            return run

        return prepare

    def interleaver(
        self, most: dict[str, int] | None = None, **seconds: list[float]
    ) -> Interleaver:
        return Interleaver({name: self.workload(name, of) for name, of in seconds.items()}, most)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return FakeClock(monkeypatch)


def run_rounds(interleaver: Interleaver, rounds: int) -> dict[str, int]:
    """Returns the number of rounds of each workload."""
    for _ in range(rounds):
        interleaver.round()
    return {name: timing.rounds for name, timing in interleaver.timings().items()}


def test_variants_are_interleaved_and_each_round_starts_with_another(clock: FakeClock) -> None:
    run_rounds(clock.interleaver(a=[1.0] * 3, b=[1.0] * 3, c=[1.0] * 3), 3)
    assert clock.calls == "abc" + "bca" + "cab"


def test_times_are_medians_and_quantiles_in_milliseconds(clock: FakeClock) -> None:
    interleaver = clock.interleaver(a=[0.004, 0.001, 0.005, 0.002, 0.003, 0.006])
    assert run_rounds(interleaver, 6) == {"a": 6}
    timing = interleaver.timings()["a"]
    found = (timing.p20_ms, timing.median_ms, timing.p80_ms)
    assert found == pytest.approx((2.0, 3.5, 5.0))


def test_set_up_and_warm_up_are_not_recorded(clock: FakeClock) -> None:
    interleaver = Interleaver({"a": clock.workload("a", [100.0, 1.0, 1.0], setup=10.0)})
    timing = interleaver.run(Budget(seconds=0.0, fewest=2))["a"]
    assert timing.p80_ms == pytest.approx(1000.0)
    assert timing.rounds == 2


def test_slow_workloads_run_in_the_first_rounds_only(clock: FakeClock) -> None:
    interleaver = clock.interleaver({"b": 2}, a=[1.0] * 5, b=[1.0] * 5)
    assert interleaver.warm_up() == pytest.approx(1.0)  # only those that run in all rounds
    assert run_rounds(interleaver, 4) == {"a": 4, "b": 2}
    assert clock.calls == "a" + "ab" + "ba" + "a" + "a"


def test_workloads_that_are_slow_during_warm_up_run_in_few_rounds(clock: FakeClock) -> None:
    interleaver = clock.interleaver(quick=[5.0] + [1.0] * 4, slow=[5.1] + [6.0] * 2)
    assert interleaver.warm_up() == pytest.approx(5.0)
    assert run_rounds(interleaver, 4) == {"quick": 4, "slow": SLOW_ROUNDS}
    all_slow = clock.interleaver(a=[9.0] * 4, b=[9.0] * 4)
    assert all_slow.warm_up() == pytest.approx(18.0)
    assert run_rounds(all_slow, 3) == {"a": 3, "b": 3}


def test_ratios_compare_laps_of_the_same_round(clock: FakeClock) -> None:
    """A machine that becomes slower changes the times, but not the ratios."""
    slower = [1.0, 2.0, 4.0, 8.0]
    interleaver = clock.interleaver(base=slower, same=slower, fast=[0.5 * x for x in slower])
    run_rounds(interleaver, 4)
    one, two = Ratio(1, 1, 1), Ratio(2, 2, 2)
    assert interleaver.ratios("base") == {"base": one, "same": one, "fast": two}
    spread = clock.interleaver(base=[3.0, 1.0, 6.0, 2.0, 5.0, 4.0], other=[1.0] * 6)
    run_rounds(spread, 6)
    ratio = spread.ratios("base")["other"]
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

    def prepare(name: str) -> Prepare:
        return lambda: lambda: name

    interleaver = Interleaver({name: prepare(name) for name in "abc"}, clock=device)
    interleaver.warm_up()
    assert "".join(device.ran) == "waitabcwait"
    device.ran.clear()
    run_rounds(interleaver, 2)
    assert "".join(device.ran) == "abcwait" + "bcawait"
    medians = [timing.median_ms for timing in interleaver.timings().values()]
    assert medians == pytest.approx([1e3 * ord(name) for name in "abc"])


class Event:
    log: ClassVar[list[str]] = []
    """calls on the device"""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: str) -> None:
        self.log.append(f"record on {stream}")

    def elapsed_time(self, _end: Event) -> float:
        return 2.5


def test_a_lap_on_a_device_is_between_events_after_the_flush(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Event.log
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
