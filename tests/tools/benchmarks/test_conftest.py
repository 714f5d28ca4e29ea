"""The runner, as `python -m benchmarks` starts it."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import conftest
from benchmarks.conftest import pytest_collection_modifyitems, pytest_exception_interact
from benchmarks.gpu_cases import causal
from benchmarks.runner.record import ROOT
from benchmarks.runner.run import Comparison
from tests.tools.bench.example import row
from transformer_kernels.bench import Row, read_rows, write_rows
from transformer_kernels.bench.rows import COLUMNS
from transformer_kernels.bench.trial import DeviceLostError


def raising(error: Exception) -> pytest.CallInfo[None]:
    def function() -> None:
        raise error

    return pytest.CallInfo.from_call(function, when="call")


def test_a_lost_device_ends_the_run() -> None:
    pytest_exception_interact(raising(AssertionError("wrong")))
    with pytest.raises(pytest.exit.Exception, match="the device is lost"):
        pytest_exception_interact(raising(DeviceLostError("the device is lost")))


@pytest.mark.parametrize(
    ("record", "lengths"), [(True, [2048, 1024]), (False, [1024, 2048])], ids=str
)
def test_a_recorded_run_starts_with_cases_without_rows(
    record: bool, lengths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(conftest, "device_slug", lambda _: "nvidia-h200")
    monkeypatch.setattr(conftest, "RECORDED", tmp_path)
    monkeypatch.setattr(conftest, "_comparison", lambda item: item)
    (tmp_path / "nvidia-h200").mkdir()
    measured = row(case=replace(causal(1024, 64), mask=None))
    write_rows(tmp_path / "nvidia-h200" / "gpu.csv", [replace(measured, variant="triton")])
    options = {"--record": record, "--variants": ["cpu", "triton"]}
    config: Any = SimpleNamespace(getoption=options.get)
    cases = [None, causal(1024, 64), causal(2048, 64)]
    items: Any = [Comparison(name="", measurements=lambda _: iter(()), case=one) for one in cases]
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
        (direction, variant)
        for direction in ("fwd", "bwd", "fwd+bwd")
        for variant in ("naive", "sdpa")
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
