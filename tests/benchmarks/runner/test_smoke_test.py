from __future__ import annotations

import sys
import time

import pytest

from benchmarks.runner.smoke_test import why_each_command_fails

HANGS = "import time; print('begun', flush=True); time.sleep(60)"
DIES = "import os; os.abort()"
FAILS = "import sys; print('wrong'); print('width 64: no kernel'); print(); sys.exit(1)"


@pytest.mark.exhaustive
def test_who_fails_does_not_take_the_others_with_it() -> None:
    programs = {"hangs": HANGS, "dies": DIES, "fails": FAILS, "runs": "print('fine')"}
    commands = {name: [sys.executable, "-c", code] for name, code in programs.items()}
    start = time.monotonic()
    failing = why_each_command_fails(commands, 10.0)
    assert time.monotonic() - start < 40.0
    assert failing == {
        "hangs": "does not end within 10 s",
        "dies": "exit status -6: nothing",
        "fails": "exit status 1: width 64: no kernel",
    }
