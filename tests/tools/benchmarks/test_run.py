from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.runner import run as runner
from benchmarks.runner.run import Comparison, Measurement, Run
from tests.tools.bench.example import PROVENANCE, row
from transformer_kernels.bench import Budget, Row, read_rows
from transformer_kernels.bench.steadiness import Speed


def new_run(folder: Path, *, keep: bool = False, **options: Any) -> Run:
    return Run(PROVENANCE, Budget(1.0), folder=folder, keep=keep, **options)


@pytest.mark.parametrize(("keep", "after_two_runs"), [(True, 2), (False, 1)])
def test_rows_are_appended_or_replaced_in_one_file_per_suite(
    keep: bool, after_two_runs: int, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "folder"
    gpu = replace(row(), suite="gpu", device="nvidia-h200")
    names = ["xeon-amx/attention.csv", "xeon-amx/masks.csv", "nvidia-h200/gpu.csv"]
    paths = [folder / (name if keep else Path(name).name) for name in names]
    for _ in range(2):
        run = new_run(folder, keep=keep)
        run.add([row(), replace(row(), suite="masks"), gpu])
        assert run.paths == paths
    for path in paths:
        assert len(read_rows(path)) == after_two_runs


@pytest.mark.parametrize("keep", [True, False])
def test_rows_of_each_measurement_are_written_before_the_next_one(
    keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "Probe", lambda _: lambda: Speed(1.0, 1.0))
    run = new_run(tmp_path, keep=keep)

    def measurements(_run: Run) -> Iterator[Measurement]:
        for count in range(1, 4):
            yield lambda suite, count=count: [replace(row(), suite=suite, N=count)]  # type: ignore[misc]
            (path,) = run.paths
            assert [one.N for one in read_rows(path)] == list(range(1, count + 1))

    rows = run.measure("masks", Comparison(name="", measurements=measurements))
    assert run.rows == rows
    assert [one.N for one in rows] == [1, 2, 3]


@pytest.mark.parametrize(
    ("speeds", "tolerance", "measurements"),
    [
        ([], 0.05, 1),
        ([1.0, 1.2], 0.05, 2),
        ([1.0, 1.2, 1.0, 1.2], 0.05, 3),
        ([1.0, 1.2], 0.19, 2),
        ([1.0, 1.2], 0.21, 1),
        ([1.0, 1.2], None, 1),
    ],
)
def test_disturbed_measurements_are_repeated_before_they_are_recorded(
    speeds: list[float],
    tolerance: float | None,
    measurements: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The probes take these times, then 1. Rows that are not kept are measured once."""
    left = iter(speeds)
    monkeypatch.setattr(runner, "Probe", lambda _: lambda: Speed(next(left, 1.0), 1.0))
    run = new_run(tmp_path, keep=tolerance is not None, tolerance=tolerance or 0.0)
    counts: list[int] = []

    def measure(_suite: str) -> list[Row]:
        counts.append(len(counts) + 1)
        return [replace(row(), N=counts[-1])]

    (one,) = run.measure("cpu", Comparison(name="a case", measurements=lambda _: iter([measure])))
    assert one.N == measurements == len(counts)
    assert run.rows == [one]
    assert run.skipped == []


def test_a_measurement_that_is_always_disturbed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's usual speed is that of the whole run."""
    left = iter([1.0] * 10)
    monkeypatch.setattr(runner, "Probe", lambda _: lambda: Speed(next(left, 1.25), 1.0))
    run = new_run(tmp_path, keep=True)

    def quiet(_suite: str) -> list[Row]:
        return [row()]

    for name, count in (("first", 5), ("second", 1)):
        comparison = Comparison(name=name, measurements=lambda _, n=count: iter([quiet] * n))  # type: ignore[misc]
        run.measure("cpu", comparison)
    assert len(run.rows) == 5
    assert run.skipped == [
        "cpu: second, fwd: the machine was 25% slower than usual during the last try"
    ]
