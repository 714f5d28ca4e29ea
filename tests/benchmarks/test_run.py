from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

from benchmarks.record import ROOT
from transformer_kernels.bench.rows import COLUMNS


def test_the_smallest_case_runs_and_leaves_its_rows(tmp_path: Path) -> None:
    options = ["-k", "causal-float32-512", "--variants", "sdpa", "--rows", str(tmp_path)]
    options += ["--seconds", "0", "--threads", "1"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "benchmarks/test_attention.py", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "causal, float32, 512 x 512, fwd+bwd" in run.stdout
    with (tmp_path / "attention.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert tuple(header) == COLUMNS
    kept = [dict(zip(header, row, strict=True)) for row in rows]
    assert [(row["direction"], row["variant"]) for row in kept] == [
        (direction, variant)
        for direction in ("fwd", "bwd", "fwd+bwd")
        for variant in ("naive", "sdpa")
    ]
    assert all(float(row["median_ms"]) > 0 and row["threads"] == "1" for row in kept)
