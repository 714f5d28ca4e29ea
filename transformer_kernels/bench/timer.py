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

from transformer_kernels.bench.work import Prepare


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

    def __init__(self, work: Mapping[str, Prepare], most: Mapping[str, int] | None = None) -> None:
        """`most` says in how many rounds, the first ones, a piece of work takes part.

        It is for the slow, of which few rounds tell enough; the others take part in all.
        """
        self._work = dict(work)
        self._most = dict(most or {})
        self._laps: dict[str, list[float]] = {name: [] for name in work}
        self._rounds = 0

    def warm_up(self) -> float:
        """One round, of those that take part in all, whose times are not kept; returns its seconds,
        set-up included."""
        start = time.perf_counter()
        for name, prepare in self._work.items():
            if name not in self._most:
                _lap(prepare)
        return time.perf_counter() - start

    def round(self) -> None:
        """Every piece of work that takes part once."""
        names = [name for name in self._work if self._rounds < self._most.get(name, math.inf)]
        first = self._rounds % len(names)
        for name in names[first:] + names[:first]:
            self._laps[name].append(_lap(self._work[name]))
        self._rounds += 1

    def run(self, budget: Budget) -> dict[str, Timing]:
        """Warms up, then takes the rounds of the budget."""
        for _ in range(budget.rounds(self.warm_up())):
            self.round()
        return self.timings()

    def timings(self) -> dict[str, Timing]:
        """So far; needs at least one round."""
        return {name: _timing(laps) for name, laps in self._laps.items()}


def _lap(prepare: Prepare) -> float:
    """Seconds of one piece of work, without its set-up and without freeing its result."""
    work = prepare()
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - start
    finally:
        if collecting:
            gc.enable()
    del result
    return seconds


def _timing(laps: list[float]) -> Timing:
    quantiles = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    low, median, high = (1e3 * torch.tensor(laps).double().quantile(quantiles)).tolist()
    return Timing(median, low, high, len(laps))
