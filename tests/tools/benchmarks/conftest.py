"""A run of one round, whose rows go to a temporary folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.runner.run import Run
from tests.tools.bench.example import PROVENANCE
from tests.tools.benchmarks.measuring import BUDGET


@pytest.fixture
def run(tmp_path: Path, without_memory: None) -> Run:
    return Run(PROVENANCE, BUDGET, folder=tmp_path, keep=False, variants=["naive", "sdpa", "cpu"])
