"""A performance goal, and its evaluation on recorded rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Literal

from benchmarks.runner.record import call_of, runs_of
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
        times = " / ".join(_time(one.median_ms) for one in (row, self.under))
        return f"{row.dtype}, S = {row.N}, D = {row.D}, {row.case}, {row.direction}: {times}"


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
        return sorted(
            self._pairs(rows), key=lambda figure: figure.ratio, reverse=self.most < math.inf
        )

    def _matches(self, row: Row) -> bool:
        return all(
            getattr(row, name) in (value if isinstance(value, tuple) else (value,))
            for name, value in {**self.where, **self.over}.items()
        )

    def _pairs(self, rows: Iterable[Row]) -> Iterable[Figure]:
        paired: dict[tuple[object, ...], Figure] = {}
        for run in reversed(runs_of(rows)):
            found = {tuple(_columns(row).values()): row for row in run}
            for key, row in found.items():
                under = found.get(tuple((_columns(row) | dict(self.under)).values()))
                if under is not None and self._matches(row):
                    paired[key] = Figure(row, under)
        return paired.values()

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


def goal(
    name: str,
    over: str | Columns,
    under: str | Columns = "cpu",
    *,
    least: float = 0.0,
    most: float = math.inf,
    by: Literal["mean", "worst"] = "worst",
    **where: object,
) -> Goal:
    """Returns a goal. A text as `over` or `under` is a variant; `where` are columns of the rows."""
    over = {"variant": over} if isinstance(over, str) else over
    under = {"variant": under} if isinstance(under, str) else under
    return Goal(name=name, over=over, under=under, where=where, least=least, most=most, by=by)


def _columns(row: Row) -> dict[str, object]:
    return {**call_of(row), "variant": row.variant}


def _time(ms: float) -> str:
    for unit, size in (("us", 1e-3), ("ms", 1.0)):
        if ms < 1e3 * size:
            return f"{ms / size:.3g} {unit}"
    return f"{ms / 1e3:.3g} s"
