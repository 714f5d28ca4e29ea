"""A performance goal, and its evaluation on recorded rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Literal

from benchmarks.runner.record import call_of, latest, runs_of
from transformer_kernels.bench import Row

Columns = Mapping[str, object]
"""Required values of a row's columns; a tuple lists alternatives."""


@dataclass(frozen=True)
class Figure:
    """Time of the row `over` divided by that of `under`, per visible query-key pair."""

    over: Row
    under: Row

    @property
    def ratio(self) -> float:
        visible = self.over.visible / self.under.visible
        return self.over.median_ms / self.under.median_ms / visible

    def __str__(self) -> str:
        row = self.over
        return (
            f"{row.dtype}, S = {row.N}, D = {row.D}, {row.case}, {row.direction}: "
            f"{_time(row.median_ms)} / {_time(self.under.median_ms)}"
        )


@dataclass(frozen=True)
class Throughput(Figure):
    """TFLOP/s of one row, which is both `over` and `under`."""

    @property
    def ratio(self) -> float:
        return self.over.tflops

    def __str__(self) -> str:
        row = self.over
        shape = f"S = {row.N}, D = {row.D}"
        return f"{row.dtype}, {shape}, {row.case}, {row.direction}: {_time(row.median_ms)}"


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Bound on the time ratio of rows that differ only in the columns of `over` and `under`."""

    name: str
    over: Columns
    under: Columns
    where: Columns = field(default_factory=dict)
    least: float = 0.0
    most: float = math.inf
    by: Literal["mean", "worst"] = "worst"
    """compare the geometric mean of all ratios with the bound, or the worst ratio"""

    def figures(self, rows: Iterable[Row]) -> list[Figure]:
        """Returns the rows that match `over`, each with its partner of the same run; worst first.

        The last run of each pair counts.
        """
        paired: dict[tuple[object, ...], Figure] = {}
        for run in reversed(runs_of(rows)):
            found = {tuple(_columns(row).values()): row for row in run}
            for key, row in found.items():
                under = found.get(tuple((_columns(row) | dict(self.under)).values()))
                if under is not None and _has(row, {**self.where, **self.over}):
                    paired[key] = Figure(row, under)
        is_cost = self.most < math.inf
        return sorted(paired.values(), key=lambda figure: figure.ratio, reverse=is_cost)

    def measured(self, figures: Sequence[Figure]) -> float:
        """Returns the value to compare with the bound; `figures` must not be empty."""
        if self.by == "mean":
            return geometric_mean(figure.ratio for figure in figures)
        return figures[0].ratio

    def reached(self, measured: float) -> bool:
        return self.least <= measured <= self.most

    @property
    def bound(self) -> str:
        return f">= {self.least:g}" if self.most == math.inf else f"<= {self.most:g}"


@dataclass(frozen=True, kw_only=True)
class SpeedGoal(Goal):
    """Bound on the TFLOP/s of rows that match `over` and `where`; `under` is unused."""

    under: Columns = field(default_factory=dict)

    def figures(self, rows: Iterable[Row]) -> list[Figure]:
        wanted = {**self.where, **self.over}
        found = [Throughput(row, row) for row in latest(rows) if _has(row, wanted)]
        return sorted(found, key=lambda figure: figure.ratio)


def _columns(row: Row) -> dict[str, object]:
    return {**call_of(row), "variant": row.variant}


def _has(row: Row, columns: Columns) -> bool:
    return all(
        getattr(row, name) in value if isinstance(value, tuple) else getattr(row, name) == value
        for name, value in columns.items()
    )


def _time(ms: float) -> str:
    for unit, size in (("us", 1e-3), ("ms", 1.0)):
        if ms < 1e3 * size:
            return f"{ms / size:.3g} {unit}"
    return f"{ms / 1e3:.3g} s"
