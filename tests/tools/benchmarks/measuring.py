"""Measures comparisons of suites in one round each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.runner.run import Comparison, Measurement, Run
from transformer_kernels.bench import Budget, Row

BUDGET = Budget(0.0, fewest=1, most=1)
Measure = Callable[[Run], Iterator[Measurement]]


def measured(run: Run, measure: Measure) -> list[Row]:
    rows = run.measure("a suite", Comparison(name="", measurements=measure))
    assert all(row.median_ms > 0 and row.suite == "a suite" for row in rows)
    return rows


def variants(rows: list[Row], direction: str = "fwd") -> list[str]:
    return [row.variant for row in rows if row.direction == direction]
