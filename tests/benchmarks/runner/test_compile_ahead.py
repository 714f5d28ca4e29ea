from __future__ import annotations

import sys
import time

import pytest

from benchmarks.cases.gpu import grid_cases, masked_cases, name_of
from benchmarks.runner.compile_ahead import run_in_time


def test_names_of_cases_are_unique() -> None:
    cases = [*masked_cases(), *grid_cases()]
    assert len({name_of(case) for case in cases}) == len(cases)


@pytest.mark.exhaustive
def test_commands_that_fail_or_take_too_long_are_not_counted() -> None:
    programs = ["pass", "raise SystemExit(1)", "import time; time.sleep(60)"]
    start = time.monotonic()
    assert run_in_time([[sys.executable, "-c", code] for code in programs], 10.0) == 1
    assert time.monotonic() - start < 40.0


def test_nothing_is_started_without_time() -> None:
    assert run_in_time([[sys.executable, "-c", "pass"]], 0.0) == 0
