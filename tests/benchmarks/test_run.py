from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from benchmarks.runner.record import ROOT
from tests.benchmarks.suite_run import run_suite
from transformer_kernels.bench.rows import COLUMNS


@pytest.mark.exhaustive
def test_the_smallest_case_runs_and_its_rows_are_written(tmp_path: Path) -> None:
    options = ["-k", "causal-float32-512", "--variants", "sdpa"]
    text, rows = run_suite("attention", tmp_path, *options)
    assert "causal, float32, 512 x 512, D 64, fwd+bwd" in text
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
    text, rows = run_suite("cpu", tmp_path, "-k", "short-bfloat16-16")
    assert [(row.direction, row.variant) for row in rows] == [
        (direction, variant)
        for direction in ("fwd", "fwd+bwd")
        for variant in ("naive", "sdpa", "cpu")
    ]
    goals = text.split(" goals ")[1]
    assert "short, (1, 1, 16, 64): SDPA / ours, worst" in goals
    assert "decode" not in goals


@pytest.mark.exhaustive
def test_the_suite_models_has_ceilings_and_goals(tmp_path: Path) -> None:
    text, rows = run_suite("models", tmp_path, "-k", "GPT_of_four or one_token and bfloat16")
    variants = {(row.case, row.dtype, row.direction, row.variant) for row in rows}
    gpt, llama = ("GPT of four heads, two texts", "Llama 3 8B, one token")
    assert (gpt, "float32", "fwd+bwd", "gemm") in variants
    assert (gpt, "bfloat16", "fwd+bwd", "sdpa") in variants
    assert (llama, "bfloat16", "fwd", "sum") in variants
    assert (llama, "bfloat16", "fwd+bwd", "cpu") in variants
    assert "float32, forward: SDPA / ours, worst" in text.split(" goals ")[1]
