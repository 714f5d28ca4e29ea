"""Clocks, and interleaved timing of several variants.

A machine's speed drifts with its clock, temperature and other load. Each round therefore runs every
variant once, starting with a different one. A slowdown then affects all variants alike, so that
ratios of medians are reproducible even if absolute times are not.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from .workload import Prepare, Workload

Seconds = Callable[[], float]
"""Returns the time of a lap in seconds; valid after `Clock.wait`."""

FLUSH_BYTES = 2**30
"""Size of the buffer that is written before each lap on a device.

It is many times larger than any L2, so that no input is cached. The write takes at least a quarter
of a millisecond, in which the host queues the lap, so that Python's overhead is not measured."""


class Clock(Protocol):
    """Measures workloads."""

    def lap(self, workload: Workload) -> Seconds:
        """Runs the workload once and returns its time, readable after `wait`."""

    def wait(self) -> None:
        """Waits until all laps have completed."""


class CpuClock:
    """Host clock around the call."""

    def lap(self, workload: Workload) -> Seconds:
        start = time.perf_counter()
        result = workload()
        seconds = time.perf_counter() - start
        del result
        return lambda: seconds

    def wait(self) -> None:
        """Does nothing: a CPU call has completed when it returns."""


class CudaClock:
    """CUDA events around the call, on the current stream, after an L2 flush.

    There is no synchronization between laps: all times of a round are read at its end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def lap(self, workload: Workload) -> Seconds:
        stream = torch.cuda.current_stream(self._device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record(stream)
        result = workload()
        end.record(stream)
        del result
        return lambda: start.elapsed_time(end) / 1e3

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)


def clock_for(device: torch.device) -> Clock:
    """Returns the clock for workloads on this device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


@dataclass(frozen=True)
class Timing:
    """Quantiles of the time over all rounds, in milliseconds."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    rounds: int


@dataclass(frozen=True)
class Ratio:
    """Quantiles of a ratio over all rounds."""

    median: float
    p20: float
    p80: float


@dataclass(frozen=True)
class Budget:
    """Number of rounds: as many as fit into `seconds`, but between `fewest` and `most`."""

    seconds: float
    fewest: int = 5
    most: int = 50

    def rounds(self, round_seconds: float) -> int:
        fitting = int(self.seconds / max(round_seconds, 1e-9))
        return min(max(fitting, self.fewest), self.most)


SLOW_SECONDS, SLOW_ROUNDS = 5.0, 2
"""Workloads that take so long a call run in few rounds: their medians are of few laps."""


class Interleaver:
    """Measures named workloads in interleaved rounds."""

    def __init__(
        self,
        workloads: Mapping[str, Prepare],
        most: Mapping[str, int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Creates the timer.

        Args:
            workloads: set-up of each workload, by name.
            most: maximum number of rounds of slow workloads, by name; the others run in all rounds.
            clock: `clock_for` the device of the workloads; the CPU clock by default.
        """
        self._workloads = dict(workloads)
        self._clock = clock or CpuClock()
        self._most = dict(most or {})
        self._laps: dict[str, list[float]] = {name: [] for name in workloads}
        self._rounds = 0

    def warm_up(self) -> float:
        """Runs one unrecorded round of the workloads that run in all rounds.

        Those that take more than SLOW_SECONDS then run in SLOW_ROUNDS only, unless all do.

        Returns:
            The duration in seconds, including set-up, without the time of slow workloads.
        """
        self._clock.wait()
        start = time.perf_counter()
        laps = {
            name: self._lap(prepare)
            for name, prepare in self._workloads.items()
            if name not in self._most
        }
        self._clock.wait()
        duration = time.perf_counter() - start
        slow = {name: seconds for name, lap in laps.items() if (seconds := lap()) > SLOW_SECONDS}
        if len(slow) == len(laps):
            return duration
        self._most |= dict.fromkeys(slow, SLOW_ROUNDS)
        return duration - sum(slow.values())

    def round(self) -> None:
        """Runs one round and records its times."""
        names = [name for name in self._workloads if self._rounds < self._most.get(name, math.inf)]
        first = self._rounds % len(names)
        seconds = {name: self._lap(self._workloads[name]) for name in names[first:] + names[:first]}
        self._clock.wait()
        for name, lap in seconds.items():
            self._laps[name].append(lap())
        self._rounds += 1

    def run(self, budget: Budget) -> dict[str, Timing]:
        """Warms up, then runs the rounds of the budget."""
        for _ in range(budget.rounds(self.warm_up())):
            self.round()
        return self.timings()

    def timings(self) -> dict[str, Timing]:
        """Returns the timings so far; needs at least one round."""
        return {name: _timing(laps) for name, laps in self._laps.items()}

    def laps(self) -> dict[str, tuple[float, ...]]:
        """Returns the times so far in milliseconds, a round after the other."""
        return {name: tuple(1e3 * lap for lap in laps) for name, laps in self._laps.items()}

    def ratios(self, base: str) -> dict[str, Ratio]:
        """Time of the workload `base` over that of each workload, within the same round.

        A slow round affects both, so that these quantiles are closer than those of the times.
        """
        return {
            name: Ratio(*_quantiles([of_base / lap for of_base, lap in pairs], [0.5, 0.2, 0.8]))
            for name, laps in self._laps.items()
            if (pairs := list(zip(self._laps[base], laps, strict=False)))
        }

    def _lap(self, prepare: Prepare) -> Seconds:
        """Measures one workload, without its set-up and without freeing its result."""
        workload = prepare()
        collecting = gc.isenabled()
        gc.disable()
        try:
            return self._clock.lap(workload)
        finally:
            if collecting:
                gc.enable()


def _timing(laps: list[float]) -> Timing:
    low, median, high = _quantiles([1e3 * lap for lap in laps], [0.2, 0.5, 0.8])
    return Timing(median, low, high, len(laps))


def _quantiles(values: list[float], at: list[float]) -> list[float]:
    samples, fractions = (torch.tensor(x, dtype=torch.float64) for x in (values, at))
    quantiles: list[float] = samples.quantile(fractions).tolist()
    return quantiles
