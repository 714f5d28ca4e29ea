"""Runs of the benchmarks: recorded rows, measurements, and the command `python -m benchmarks`."""

from __future__ import annotations

import csv
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import conftest
from benchmarks.conftest import pytest_collection_modifyitems, pytest_exception_interact
from benchmarks.gpu_cases import causal
from benchmarks.runner import run as runner
from benchmarks.runner.record import ROOT, as_text, call_of, latest, longest_ago_first, runs_of
from benchmarks.runner.run import Comparison, Measurement, Run
from tests.tools.bench.example import PROVENANCE, row
from transformer_kernels.bench import Budget, Case, Row, read_rows, write_rows
from transformer_kernels.bench.rows import COLUMNS
from transformer_kernels.bench.steadiness import Speed
from transformer_kernels.bench.trial import DeviceLostError

LENGTHS = (8192, 1024, 4096, 2048)
CASES = {f"S{S}": causal(S, 64) for S in LENGTHS}
CASES["D128"] = causal(8192, 128)
VARIANTS = ("cuda_sm90", "sdpa_cudnn")


def rows_on(names: str, day: int, variant: str = "cuda_sm90") -> list[Row]:
    """Rows of cases. Without their mask, whose visible fraction takes seconds to compute."""
    cases = [replace(CASES[name], mask=None) for name in names.split()]
    date = f"2026-02-0{day}T00:00:00Z"
    return [replace(row(case=case), variant=variant, date=date) for case in cases]


def order(measured: list[Row], items: str = " ".join(CASES)) -> str:
    def case_of(item: str) -> Case | None:
        return CASES.get(item)

    return " ".join(longest_ago_first(items.split(), case_of, measured, VARIANTS))


def test_the_order_stays_without_rows_and_after_a_complete_run() -> None:
    given = "S8192 S1024 S4096 S2048 D128"
    assert order([]) == order(rows_on(given, 1)) == given


def test_a_run_that_ended_early_is_continued() -> None:
    assert order(rows_on("S8192 S1024", 1)) == "S4096 S2048 D128 S8192 S1024"
    measured = [*rows_on("S4096 S2048 D128 S8192", 2), *rows_on("S8192 S1024", 1)]
    assert order(measured) == "S1024 S8192 S4096 S2048 D128"


def test_rows_of_other_variants_do_not_count() -> None:
    measured = rows_on("S8192", 1, "naive")
    assert order(measured) == order([])
    measured += rows_on("S1024", 1, "sdpa_cudnn")
    assert order(measured) == "S8192 S4096 S2048 D128 S1024"


def test_other_dtypes_are_other_cases() -> None:
    measured = [replace(one, dtype="float16") for one in rows_on("S8192", 1)]
    assert order(measured) == order([])


def test_other_tests_and_both_directions_of_a_case_stay_in_their_places() -> None:
    items = "ceiling S8192 S8192 masks S1024 S1024 decode"
    assert order(rows_on("S8192", 1), items) == "ceiling S1024 S1024 masks S8192 S8192 decode"


def test_latest_keeps_the_last_row_of_each_case_and_variant() -> None:
    others = [replace(row(), variant="naive"), replace(row(), N=8), replace(row(), threads=7)]
    old = [row(), *others]
    new = replace(row(), date="2026-02-01T00:00:00Z")
    for order in ([*old, new], [new, *old]):
        assert sorted(map(repr, latest(order))) == sorted(map(repr, [new, *others]))


def test_threads_of_the_host_do_not_identify_a_call_on_a_gpu() -> None:
    for suite, calls in (("gpu", 1), ("cpu", 2)):
        rows_on = [replace(row(), suite=suite, threads=threads) for threads in (1, 16)]
        assert len({tuple(call_of(one).values()) for one in rows_on}) == calls
        assert len(latest(rows_on)) == calls


def test_runs_are_separated_and_the_last_comes_first() -> None:
    first, second = (replace(row(), date=f"2026-02-0{day}T00:00:00Z") for day in (1, 2))
    naive = replace(first, variant="naive")
    assert runs_of([first, second, naive]) == [[second], [first, naive]]


def test_text_has_a_title_per_call_and_the_time_of_each_variant_over_the_first() -> None:
    step = replace(row(), direction="step", tflops=math.nan, gbytes_s=math.nan, error=math.nan)
    lines = as_text([row(), replace(row(), variant="naive", median_ms=5.0), step])
    assert [line for line in lines if line.endswith(("fwd", "step"))] == [
        "causal, float16, B 1, H 8/8, 4 x 4, D 64, fwd",
        "causal, float16, B 1, H 8/8, 4 x 4, D 64, step",
    ]
    ours, naive, steps = (line for line in lines if "threads" in line)
    assert "cpu " in ours
    assert "2.000 ms  (1.500 .. 2.500)    1.000x       3.0 MiB  error 1.2e-07" in ours
    assert "2.500x" in naive
    assert "TFLOP/s" in naive
    assert "nan" not in steps
    assert "error" not in steps


def new_run(folder: Path, *, keep: bool = False, **options: Any) -> Run:
    return Run(PROVENANCE, Budget(1.0), folder=folder, keep=keep, **options)


def test_rows_are_appended_or_replaced_in_one_file_per_suite(tmp_path: Path) -> None:
    gpu = replace(row(), suite="gpu", device="nvidia-h200")
    names = ["xeon-amx/attention.csv", "xeon-amx/masks.csv", "nvidia-h200/gpu.csv"]
    for keep, after_two_runs in ((True, 2), (False, 1)):
        folder = tmp_path / f"{keep}" / "folder"
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


def test_disturbed_measurements_are_repeated_before_they_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probes take these times, then 1. Rows that are not kept are measured once."""
    for speeds, tolerance, measurements in (
        ([], 0.05, 1),
        ([1.0, 1.2], 0.05, 2),
        ([1.0, 1.2, 1.0, 1.2], 0.05, 3),
        ([1.0, 1.2], 0.19, 2),
        ([1.0, 1.2], 0.21, 1),
        ([1.0, 1.2], None, 1),
    ):
        times, counts = iter([*speeds, *[1.0] * 9]), itertools.count(1)
        monkeypatch.setattr(runner, "Probe", lambda _, times=times: lambda: Speed(next(times), 1.0))
        run = new_run(tmp_path, keep=tolerance is not None, tolerance=tolerance or 0.0)

        def measure(_suite: str, counts: Iterator[int] = counts) -> list[Row]:
            return [replace(row(), N=next(counts))]

        repeated = Comparison(name="", measurements=lambda _, one=measure: iter([one]))  # type: ignore[misc]
        (one,) = run.measure("cpu", repeated)
        assert one.N == measurements == next(counts) - 1
        assert run.rows == [one]
        assert run.skipped == []


def test_a_measurement_that_is_always_disturbed_is_marked(
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
    (path,) = run.paths
    assert [one.slower for one in read_rows(path)] == [None] * 5 + [0.25]
    assert [line.endswith("disturbed: 25% slower than usual") for line in as_text(run.rows)] == [
        *[False] * 7, True,
    ]  # fmt: skip


def raising(error: Exception) -> pytest.CallInfo[None]:
    def function() -> None:
        raise error

    return pytest.CallInfo.from_call(function, when="call")


def test_a_lost_device_ends_the_run() -> None:
    pytest_exception_interact(raising(AssertionError("wrong")))
    with pytest.raises(pytest.exit.Exception, match="the device is lost"):
        pytest_exception_interact(raising(DeviceLostError("the device is lost")))


def test_a_recorded_run_starts_with_cases_without_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(conftest, "device_slug", lambda _: "nvidia-h200")
    monkeypatch.setattr(conftest, "RECORDED", tmp_path)
    monkeypatch.setattr(conftest, "_comparison", lambda item: item)
    (tmp_path / "nvidia-h200").mkdir()
    measured = row(case=replace(causal(1024, 64), mask=None))
    write_rows(tmp_path / "nvidia-h200" / "gpu.csv", [replace(measured, variant="triton")])
    cases = [None, causal(1024, 64), causal(2048, 64)]
    for record, lengths in ((True, [2048, 1024]), (False, [1024, 2048])):
        options = {"--record": record, "--variants": ["cpu", "triton"]}
        config: Any = SimpleNamespace(getoption=options.get)
        items: Any = [Comparison(name="", measurements=lambda _: iter(()), case=x) for x in cases]
        pytest_collection_modifyitems(config, items)
        assert items[0].case is None
        assert [one.case.M for one in items[1:]] == lengths


def benchmarks(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *words], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def run_suite(suite: str, rows: Path, *options: str) -> tuple[str, list[Row]]:
    """Runs a suite with the fewest rounds; returns the printed text and the rows."""
    done = benchmarks(suite, "--rows", str(rows), "--seconds", "0", "--threads", "1", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, read_rows(rows / f"{suite}.csv")


@pytest.mark.exhaustive
def test_the_smallest_case_runs_and_its_rows_are_written(tmp_path: Path) -> None:
    options = ["-k", "causal-float32-512", "--variants", "sdpa"]
    text, rows = run_suite("attention", tmp_path, *options)
    assert "causal, float32, B 1, H 8/8, 512 x 512, D 64, fwd+bwd" in text
    with (tmp_path / "attention.csv").open(newline="") as file:
        assert tuple(next(csv.reader(file))) == COLUMNS
    assert [(row.direction, row.variant) for row in rows] == [
        (direction, "sdpa") for direction in ("fwd", "bwd", "fwd+bwd")
    ]
    assert all(row.median_ms > 0 and row.threads == 1 for row in rows)
    assert f"report: {os.path.relpath(tmp_path / 'report.md', ROOT)}" in text
    assert "torch SDPA" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.exhaustive
def test_the_suite_cpu_ends_with_a_table_of_goals(tmp_path: Path) -> None:
    text, _ = run_suite("cpu", tmp_path, "-k", "short-bfloat16-16")
    goals = text.split(" goals ")[1]
    assert "short, (1, 1, 16, 64): SDPA / ours, worst" in goals
    assert "decode" not in goals


@pytest.mark.exhaustive
def test_a_package_that_is_not_installed_is_a_reason_to_skip(tmp_path: Path) -> None:
    if (ROOT / "build" / "hub_packages").exists():
        return
    options = ["-rs", "--rows", str(tmp_path)]
    text = benchmarks("sentence_encoder", *options).stdout
    assert "No module named 'sentence_transformers'" in text or "2 passed" in text


def test_an_unknown_suite_is_an_error() -> None:
    done = benchmarks("masts")
    assert done.returncode != 0
    assert "--suite: expected names of attention, " in done.stderr
