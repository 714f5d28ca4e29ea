"""Measures the comparisons of the chosen suites; conftest.py has the options."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.runner.run import Comparison, NotMeasuredError, Run


def test_comparison(
    benchmark: BenchmarkFixture, run: Run, suite: str, comparison: Comparison
) -> None:
    """Runs as one round of pytest-benchmark: times of the variants are in `extra_info`."""
    benchmark.group = suite
    try:
        rows = benchmark.pedantic(run.measure, args=(suite, comparison))  # type: ignore[no-untyped-call]
    except (NotMeasuredError, ModuleNotFoundError) as reason:
        pytest.skip(str(reason))
    for row in rows:
        benchmark.extra_info[f"{row.case}, {row.direction}, {row.variant}_ms"] = row.median_ms
