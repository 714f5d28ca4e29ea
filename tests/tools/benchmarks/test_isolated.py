from __future__ import annotations

import math
import sys
import time

import pytest

from benchmarks.gpu_cases import grid_cases, linear_cases, masked_cases, name_of
from benchmarks.runner.isolated import failures

HANGS = "import time; print('begun', flush=True); time.sleep(60)"
DIES = "import os; os.abort()"
FAILS = "import sys; print('wrong'); print('width 64: no kernel'); print(); sys.exit(1)"


@pytest.mark.exhaustive
def test_a_failing_command_does_not_affect_the_others() -> None:
    commands = [[sys.executable, "-c", code] for code in (HANGS, DIES, FAILS, "print('fine')")]
    start = time.monotonic()
    assert failures(commands, 10.0, workers=4) == [
        "still running after 10 s",
        "exit status -6: no output",
        "exit status 1: width 64: no kernel",
        None,
    ]
    assert time.monotonic() - start < 40.0


def test_nothing_is_started_without_time() -> None:
    reasons = failures([[sys.executable, "-c", "pass"]], 0.0, workers=1)
    assert reasons == ["not started within 0 s"]


def test_there_may_be_no_time_limit() -> None:
    assert failures([[sys.executable, "-c", "pass"]], math.inf, workers=1) == [None]


def test_names_of_cases_are_unique() -> None:
    cases = [*masked_cases(), *grid_cases(), *linear_cases()]
    assert len({name_of(case) for case in cases}) == len(cases)
