"""The clocks, with a simulated device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from transformer_kernels.bench import Interleaver, clocks
from transformer_kernels.bench.clocks import Seconds
from transformer_kernels.bench.workload import Workload

CPU = torch.device("cpu")


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

    timer = Interleaver({name: prepare(name) for name in "abc"}, clock=device)
    timer.warm_up()
    assert "".join(device.ran) == "waitabcwait"
    device.ran.clear()
    timer.round()
    timer.round()
    assert "".join(device.ran) == "abcwait" + "bcawait"
    medians = [timing.median_ms for timing in timer.timings().values()]
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
    monkeypatch.setattr(clocks, "FLUSH_BYTES", 8)
    monkeypatch.setattr(torch.Tensor, "zero_", lambda x: log.append(f"flush {x.numel()}"))
    clock = clocks.CudaClock(CPU)
    seconds = clock.lap(lambda: log.append("work"))
    assert log == ["flush 8", "record on the stream of cpu", "work", "record on the stream of cpu"]
    clock.wait()
    assert log[-1] == "wait for cpu"
    assert seconds() == pytest.approx(2.5e-3)


def test_the_clock_depends_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(clocks.clock_for(CPU), clocks.CpuClock)
    made: list[torch.device] = []
    monkeypatch.setattr(clocks, "CudaClock", made.append)
    clocks.clock_for(torch.device("cuda:1"))
    assert made == [torch.device("cuda:1")]
