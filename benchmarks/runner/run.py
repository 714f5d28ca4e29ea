"""Comparisons of implementations, and a run that measures them and writes their rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from transformer_kernels.bench import (
    VARIANTS,
    Budget,
    Case,
    Provenance,
    Row,
    Variant,
    append_rows,
    usable_variants,
    write_rows,
)
from transformer_kernels.bench.contenders import Contender, measure_contenders
from transformer_kernels.bench.provenance import CPU
from transformer_kernels.bench.steadiness import TOLERANCE, Probe, Watch, measure_steadily

Measurement = Callable[[str], list[Row]]
"""Measures workloads in shared rounds and returns their rows; the argument is the suite."""


class NotMeasuredError(Exception):
    """A comparison that this machine or installation cannot run. The message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Implementations of one problem."""

    name: str
    """unique within its suite"""
    measurements: Callable[[Run], Iterator[Measurement]]
    """checks the implementations, then yields what to measure.

    Raises AssertionError if a result is wrong, and NotMeasuredError or ModuleNotFoundError if none
    can run."""
    device: torch.device = CPU
    case: Case | None = None
    """case of the suite `gpu` by which a recorded run continues an earlier one"""


class Run:
    """Measures comparisons and writes the rows of each immediately, one file per suite: an aborted
    run loses none."""

    def __init__(
        self,
        provenance: Provenance,
        budget: Budget,
        *,
        folder: Path,
        keep: bool,
        tolerance: float = TOLERANCE,
        variants: Iterable[str] = tuple(VARIANTS),
        time_limit: float = math.inf,
    ) -> None:
        """Creates a run.

        Args:
            provenance: shared columns of the rows.
            budget: default time budget of a measurement.
            folder: destination.
            keep: append to `folder/<device>/<suite>.csv`; otherwise replace `folder/<suite>.csv`.
            tolerance: how much slower than usual the machine may be, as a fraction, if rows are
                kept.
            variants: names of the variants to measure.
            time_limit: seconds after which the suite `gpu` starts no further case.
        """
        self.provenance = provenance
        self.budget = budget
        self.variants = tuple(dict.fromkeys(variants))
        self.time_limit = time_limit
        self.selected: list[Comparison] = []
        """comparisons that will be measured, in order"""
        self.rows: list[Row] = []
        self.skipped: list[str] = []
        """comparisons and variants that were not measured, with reasons"""
        self._end = time.monotonic() + time_limit
        self._folder = folder
        self._keep = keep
        self._tolerance = tolerance
        self._watches: dict[torch.device, Watch] = {}

    @property
    def time_left(self) -> float:
        return self._end - time.monotonic()

    def usable(self, device: torch.device = CPU) -> list[Variant]:
        """Returns the chosen variants that can run on a device."""
        return usable_variants(self.variants, device)

    def share(self, share: float) -> Budget:
        """Returns a fraction of the time budget."""
        return replace(self.budget, seconds=share * self.budget.seconds)

    def timed(self, contenders: Sequence[Contender], budget: Budget | None = None) -> Measurement:
        """Returns the measurement of peak memory and interleaved times of contenders."""
        provenance = self.provenance.on(contenders[0].case.device)

        def measure(suite: str) -> list[Row]:
            measured = measure_contenders(
                contenders, provenance=provenance, suite=suite, budget=budget or self.budget
            )
            return [one.row for one in measured]

        return measure

    def measure(self, suite: str, comparison: Comparison) -> list[Row]:
        """Checks and measures a comparison, and adds its rows.

        If rows are kept, the machine is watched: a measurement is repeated while another process
        disturbs it. Rows of the last of TRIES are marked (`Row.slower`).

        Returns:
            The rows.
        """
        rows = []
        for measurement in comparison.measurements(self):
            found = self._steady(suite, comparison.device, measurement)
            self.add(found)
            rows += found
        return rows

    def _steady(self, suite: str, device: torch.device, measurement: Measurement) -> list[Row]:
        if not self._keep:
            return measurement(suite)
        if device not in self._watches:
            self._watches[device] = Watch(Probe(device))
        steady = measure_steadily(
            [suite], measurement, self._watches[device], tolerance=self._tolerance
        )
        marked = [replace(row, slower=one.slower) for one in steady.disturbed for row in one.result]
        return [*(row for _, result in steady.results for row in result), *marked]

    def add(self, rows: Sequence[Row]) -> None:
        """Adds rows and writes them to the file of their suite."""
        self.rows += rows
        for path, of_path in self._by_path(rows).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._keep:
                append_rows(path, of_path)
            else:
                write_rows(path, self._by_path(self.rows)[path])

    @property
    def paths(self) -> list[Path]:
        """Files that contain the rows."""
        return list(self._by_path(self.rows))

    def _by_path(self, rows: Iterable[Row]) -> dict[Path, list[Row]]:
        by_path: dict[Path, list[Row]] = {}
        for row in rows:
            folder = self._folder / row.device if self._keep else self._folder
            by_path.setdefault(folder / f"{row.suite}.csv", []).append(row)
        return by_path
