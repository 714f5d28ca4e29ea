from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path

import pytest
import torch

from benchmarks.runner.without_amx import ENVIRONMENT, process_without_amx, rows_without_amx, saved
from tests.bench.example import PROVENANCE
from tests.benchmarks.suite_run import run_suite
from transformer_kernels import _C
from transformer_kernels.bench import Budget, Case, Row, usable_variants
from transformer_kernels.bench.contenders import Expected, check
from transformer_kernels.bench.provenance import device_slug

CASE = Case(name="full", H_q=2, H_kv=2, M=16, N=16, D=8, D_v=8, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def worker() -> Iterator[Executor]:
    try:
        with process_without_amx(threads=1) as started:
            yield started
    except ValueError as reason:
        pytest.skip(str(reason))


def measured(worker: Executor, expected: Expected) -> list[Row]:
    with saved(expected) as path:
        return worker.submit(
            rows_without_amx,
            CASE,
            path,
            direction="fwd+bwd",
            provenance=PROVENANCE,
            budget=Budget(0.0, fewest=1),
        ).result()


def test_only_the_worker_is_restricted(worker: Executor) -> None:
    assert worker.submit(_C.isa).result() == "avx512"
    assert worker.submit(torch.get_num_threads).result() == 1
    for name, value in ENVIRONMENT.items():
        assert worker.submit(os.getenv, name).result() == value
        assert os.getenv(name) != value


def test_rows_are_marked_as_without_amx(worker: Executor) -> None:
    rows = measured(worker, check(CASE, usable_variants(["naive"])).expected)
    assert [(row.case, row.variant, row.suite) for row in rows] == [
        ("full, without AMX", "sdpa", "cpu"),
        ("full, without AMX", "cpu", "cpu"),
    ]
    assert all(row.date == PROVENANCE.date and row.median_ms > 0 for row in rows)


def test_the_worker_checks_before_it_measures(worker: Executor) -> None:
    expected = check(CASE, usable_variants(["naive"])).expected
    wrong = Expected(*(of._replace(o=of.o + 1.0) for of in (expected.exact, expected.naive)))
    with pytest.raises(AssertionError, match="sdpa, full, without AMX: o"):
        measured(worker, wrong)


@pytest.mark.exhaustive
@pytest.mark.skipif(not device_slug().endswith("-amx"), reason="this CPU has no AMX")
@pytest.mark.usefixtures("worker")
def test_the_suite_records_rows_without_amx(tmp_path: Path) -> None:
    chosen = "without_amx and fwd-full-bfloat16-512"
    text, rows = run_suite("cpu", tmp_path, "-k", chosen)
    assert [(row.case, row.direction, row.variant) for row in rows] == [
        ("full, without AMX", "fwd", "sdpa"),
        ("full, without AMX", "fwd", "cpu"),
    ]
    assert all(row.threads == 1 for row in rows)
    assert "bfloat16 forward, AMX off: SDPA / ours, mean" in text
