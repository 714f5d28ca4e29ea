from __future__ import annotations

import sys
import time

import pytest

from benchmarks.runner.smoke_test import command_failure_reasons

HANGS = "import time; print('begun', flush=True); time.sleep(60)"
DIES = "import os; os.abort()"
FAILS = "import sys; print('wrong'); print('width 64: no kernel'); print(); sys.exit(1)"


@pytest.mark.exhaustive
def test_a_failing_command_does_not_affect_the_others() -> None:
    programs = {"hangs": HANGS, "dies": DIES, "fails": FAILS, "runs": "print('fine')"}
    commands = {name: [sys.executable, "-c", code] for name, code in programs.items()}
    start = time.monotonic()
    failing = command_failure_reasons(commands, 10.0)
    assert time.monotonic() - start < 40.0
    assert failing == {
        "hangs": "still running after 10 s",
        "dies": "exit status -6: no output",
        "fails": "exit status 1: width 64: no kernel",
    }
