"""Runs a benchmark suite in a subprocess, with the fewest possible rounds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.runner.record import ROOT
from transformer_kernels.bench import Row, read_rows


def run_suite(suite: str, rows: Path, *options: str) -> tuple[str, list[Row]]:
    """Returns the printed text and the recorded rows."""
    short = ["--rows", str(rows), "--seconds", "0", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", f"benchmarks/test_{suite}.py", *short, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, read_rows(rows / f"{suite}.csv")
