"""Times of several variants, taken in turn.

A machine's speed drifts, by clock, temperature and neighbours. So each round runs every variant
once, and each round starts with another one: what slows the machine slows them alike, and ratios
of medians hold where the times themselves do not.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from transformer_kernels.bench.clocks import Clock, CpuClock, Seconds
from transformer_kernels.bench.workload import Prepare


@dataclass(frozen=True)
class Timing:
    """Over rounds, in milliseconds."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    rounds: int


@dataclass(frozen=True)
class Budget:
    """How many rounds to take: as many as fit into `seconds`, within bounds."""

    seconds: float
    fewest: int = 5
    most: int = 50

    def rounds(self, round_seconds: float) -> int:
        fitting = int(self.seconds / max(round_seconds, 1e-9))
        return min(max(fitting, self.fewest), self.most)


class Interleaver:
    """Collects times of named pieces of work, round by round."""

    def __init__(
        self,
        work: Mapping[str, Prepare],
        most: Mapping[str, int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`most` says in how many rounds, the first ones, a piece of work takes part.

        It is for the slow, of which few rounds tell enough; the others take part in all. `clock` is
        `clock_for` the device that the work runs on; the CPU's unless given.
        """
        self._work = dict(work)
        self._clock = clock or CpuClock()
        self._most = dict(most or {})
        self._laps: dict[str, list[float]] = {name: [] for name in work}
        self._rounds = 0

    def warm_up(self) -> float:
        """One round, of those that take part in all, whose times are not kept; returns its seconds,
        set-up included."""
        self._clock.wait()
        start = time.perf_counter()
        for name, prepare in self._work.items():
            if name not in self._most:
                self._lap(prepare)
        self._clock.wait()
        return time.perf_counter() - start

    def round(self) -> None:
        """Every piece of work that takes part once."""
        names = [name for name in self._work if self._rounds < self._most.get(name, math.inf)]
        first = self._rounds % len(names)
        seconds = {name: self._lap(self._work[name]) for name in names[first:] + names[:first]}
        self._clock.wait()
        for name, lap in seconds.items():
            self._laps[name].append(lap())
        self._rounds += 1

    def run(self, budget: Budget) -> dict[str, Timing]:
        """Warms up, then takes the rounds of the budget."""
        for _ in range(budget.rounds(self.warm_up())):
            self.round()
        return self.timings()

    def timings(self) -> dict[str, Timing]:
        """So far; needs at least one round."""
        return {name: _timing(laps) for name, laps in self._laps.items()}

    def _lap(self, prepare: Prepare) -> Seconds:
        """Of one piece of work, without its set-up and without freeing its result."""
        work = prepare()
        collecting = gc.isenabled()
        gc.disable()
        try:
            return self._clock.lap(work)
        finally:
            if collecting:
                gc.enable()


def _timing(laps: list[float]) -> Timing:
    quantiles = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    low, median, high = (1e3 * torch.tensor(laps).double().quantile(quantiles)).tolist()
    return Timing(median, low, high, len(laps))
