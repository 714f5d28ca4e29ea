"""Detection of a disturbed machine, by a short probe before and after each measurement.

Interleaving makes ratios independent of a slow drift. It does not help where another process takes
a core for part of a measurement: the variants lose different shares of it. The probe is a matrix
product and a copy, some 50 ms on a CPU. A measurement counts if the probes before and after it were
as fast as the faster ones of the run, to a tolerance; otherwise it is repeated after the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Generic, NamedTuple, TypeVar

import torch

from .timer import clock_for
from .workload import Workload

TOLERANCE = 0.05
TRIES = 3
SIDES = {"cpu": 768, "cuda": 4096}
"""Side of the probe's square matrices, by type of device"""
BYTES = {"cpu": 2**25, "cuda": 2**28}
"""Size of the buffer that the probe copies, by type of device"""
REPEATS = 5

T = TypeVar("T")
R = TypeVar("R")


class Speed(NamedTuple):
    """Seconds of a matrix product and of a copy, medians of REPEATS."""

    product: float
    copy: float


class Probe:
    """Measures the speed of a device, with tensors that are allocated once."""

    def __init__(self, device: torch.device) -> None:
        side, size = SIDES[device.type], BYTES[device.type]
        x, y = (torch.randn(side, side, device=device) for _ in range(2))
        source, target = (torch.ones(size // 4, device=device) for _ in range(2))
        self._workloads: tuple[Workload, Workload] = (
            lambda: torch.mm(x, y),
            lambda: target.copy_(source),
        )
        self._clock = clock_for(device)
        self()

    def __call__(self) -> Speed:
        laps = [[self._clock.lap(one) for one in self._workloads] for _ in range(REPEATS)]
        self._clock.wait()
        return Speed(*(median(lap() for lap in of_one) for of_one in zip(*laps, strict=True)))


class Watch:
    """Probes a machine, and knows its usual speed."""

    def __init__(self, probe: Callable[[], Speed]) -> None:
        self._probe = probe
        self._speeds: list[Speed] = []

    def probe(self) -> Speed:
        """Measures the speed now."""
        self._speeds.append(self._probe())
        return self._speeds[-1]

    def slowdown(self, *speeds: Speed) -> float:
        """Returns how much slower than usual the slowest part was, as a fraction: 0.05 is 5%.

        Usual are the lower quartiles of all probes: a moment of turbo does not change them, as it
        would change a minimum.
        """
        quartile = (len(self._speeds) - 1) // 4
        usual = Speed(*(sorted(part)[quartile] for part in zip(*self._speeds, strict=True)))
        parts = [(one.product / usual.product, one.copy / usual.copy) for one in speeds]
        return max(max(part) for part in parts) - 1.0


@dataclass(frozen=True)
class Disturbed(Generic[T, R]):
    """An item that was disturbed in every try."""

    item: T
    result: R
    """of the last try"""
    slower: float
    """how much slower the machine was during the last try, as a fraction"""


@dataclass(frozen=True)
class Steady(Generic[T, R]):
    """Results of `measure_steadily`."""

    results: list[tuple[T, R]]
    """items that were measured undisturbed, in their order, with their results"""
    disturbed: list[Disturbed[T, R]]
    """the others"""


def measure_steadily(
    items: Iterable[T],
    measure: Callable[[T], R],
    watch: Watch,
    *,
    tolerance: float = TOLERANCE,
    tries: int = TRIES,
) -> Steady[T, R]:
    """Measures items, and those that were disturbed once more after all others.

    Args:
        items: what to measure.
        measure: measures one item.
        watch: measures the speed of the machine; it may have watched earlier measurements.
        tolerance: how much slower than usual the machine may be, as a fraction.
        tries: largest number of measurements of an item.
    """
    items = list(items)
    pending = list(range(len(items)))
    results: dict[int, R] = {}
    probes: dict[int, tuple[Speed, Speed]] = {}
    for _ in range(tries):
        before = watch.probe()
        for index in pending:
            results[index] = measure(items[index])
            after = watch.probe()
            probes[index] = before, after
            before = after
        pending = [index for index in results if watch.slowdown(*probes[index]) > tolerance]
        if not pending:
            break
    return Steady(
        [(items[index], result) for index, result in results.items() if index not in pending],
        [Disturbed(items[i], results[i], watch.slowdown(*probes[i])) for i in pending],
    )
