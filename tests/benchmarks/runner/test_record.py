from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.runner import record
from benchmarks.runner.record import Recorder, as_text, call_of, latest, runs_of
from tests.bench.example import PROVENANCE, row
from transformer_kernels.bench import Budget, Row, read_rows
from transformer_kernels.bench.steadiness import Speed


@pytest.mark.parametrize(("keep", "after_two_runs"), [(True, 2), (False, 1)])
def test_rows_are_appended_or_replaced_in_one_file_per_suite(
    keep: bool, after_two_runs: int, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "folder"
    gpu = replace(row(), suite="gpu", device="nvidia-h200")
    names = ["xeon-amx/attention.csv", "xeon-amx/masks.csv", "nvidia-h200/gpu.csv"]
    paths = [folder / (name if keep else Path(name).name) for name in names]
    for _ in range(2):
        recorder = Recorder(PROVENANCE, Budget(1.0), folder=folder, keep=keep)
        recorder.add([row(), replace(row(), suite="masks"), gpu])
        assert recorder.paths == paths
    for path in paths:
        assert len(read_rows(path)) == after_two_runs


@pytest.mark.parametrize("keep", [True, False])
def test_rows_are_written_immediately(keep: bool, tmp_path: Path) -> None:
    recorder = Recorder(PROVENANCE, Budget(1.0), folder=tmp_path, keep=keep)
    for count in range(1, 4):
        recorder.add([replace(row(), N=count)])
        (path,) = recorder.paths
        assert [one.N for one in read_rows(path)] == list(range(1, count + 1))


def test_latest_keeps_the_last_row_of_each_case_and_variant() -> None:
    others = [replace(row(), variant="naive"), replace(row(), N=8), replace(row(), threads=7)]
    old = [row(), *others]
    new = replace(row(), date="2026-02-01T00:00:00Z")
    for order in ([*old, new], [new, *old]):
        assert sorted(map(repr, latest(order))) == sorted(map(repr, [new, *others]))


def test_threads_of_the_host_do_not_identify_a_call_on_a_gpu() -> None:
    for suite, calls in (("gpu", 1), ("cpu", 2)):
        rows = [replace(row(), suite=suite, threads=threads) for threads in (1, 16)]
        assert len({tuple(call_of(one).values()) for one in rows}) == calls
        assert len(latest(rows)) == calls


def test_runs_are_separated_and_the_last_comes_first() -> None:
    first, second = (replace(row(), date=f"2026-02-0{day}T00:00:00Z") for day in (1, 2))
    naive = replace(first, variant="naive")
    assert runs_of([first, second, naive]) == [[second], [first, naive]]


def test_text_has_a_title_per_case_and_a_line_per_row() -> None:
    lines = as_text([row(), replace(row(), variant="naive"), replace(row(), direction="bwd")])
    assert [line for line in lines if line.endswith(("fwd", "bwd"))] == [
        "causal, float16, 4 x 4, D 64, fwd",
        "causal, float16, 4 x 4, D 64, bwd",
    ]
    assert sum("2.000 ms  (1.500 .. 2.500)" in line for line in lines) == 3


def recorder_with(
    speeds: list[float],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    keep: bool,
    tolerance: float = 0.05,
) -> Recorder:
    """A recorder on a machine whose probes take these times, then 1."""
    left = iter(speeds)
    monkeypatch.setattr(record, "Probe", lambda _: lambda: Speed(next(left, 1.0), 1.0))
    return Recorder(PROVENANCE, Budget(1.0), folder=folder, keep=keep, tolerance=tolerance)


@pytest.mark.parametrize(
    ("speeds", "measurements"), [([], 1), ([1.0, 1.2], 2), ([1.0, 1.2, 1.0, 1.2], 3)]
)
def test_disturbed_measurements_are_repeated_before_they_are_recorded(
    speeds: list[float], measurements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recorder_with(speeds, tmp_path, monkeypatch, keep=True)
    counts: list[int] = []

    def measure() -> list[Row]:
        counts.append(len(counts) + 1)
        return [replace(row(), N=counts[-1])]

    (one,) = recorder.add_steady("a case", measure)
    assert one.N == measurements == len(counts)
    assert recorder.rows == [one]
    assert recorder.skipped == []


@pytest.mark.parametrize(("tolerance", "measurements"), [(0.19, 2), (0.21, 1)])
def test_the_tolerance_decides_what_is_disturbed(
    tolerance: float, measurements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recorder_with([1.0, 1.2], tmp_path, monkeypatch, keep=True, tolerance=tolerance)
    calls: list[list[Row]] = []

    def measure() -> list[Row]:
        calls.append([row()])
        return calls[-1]

    recorder.add_steady("a case", measure)
    assert len(calls) == measurements


def test_measurement_that_is_always_disturbed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's usual speed is that of the whole run."""
    recorder = recorder_with([1.0] * 6 + [1.25] * 6, tmp_path, monkeypatch, keep=True)
    for name in ("first", "second", "third"):
        recorder.add_steady(name, lambda: [row()])
    assert recorder.add_steady("fourth", lambda: [row()]) == []
    assert len(recorder.rows) == 3
    expected = "fourth: the machine was 25% slower than usual during the last try"
    assert recorder.skipped == [expected]


def test_rows_that_are_not_kept_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recorder_with([1.0, 2.0, 3.0], tmp_path, monkeypatch, keep=False)
    assert recorder.add_steady("a case", lambda: [row()]) == recorder.rows == [row()]
