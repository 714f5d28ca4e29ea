from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks.runner import stages
from benchmarks.runner.stages import Stage, run_all

pytestmark = pytest.mark.usefixtures("_short_grace")


@pytest.fixture
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "GRACE", 5.0)


def stage(name: str, code: str, folder: Path, *, least: float = 0.0) -> Stage:
    return Stage(
        name=name,
        command=lambda seconds: [sys.executable, "-c", code, f"{seconds:.0f}"],
        log=folder / "all.log",
        least=least,
        environment={"STAGE": name},
    )


def test_every_stage_runs_and_reports_its_outcome(tmp_path: Path) -> None:
    planned = [
        stage("good", "import os; print('fine', os.environ['STAGE'])", tmp_path),
        stage("bad", "import sys; print('broken'); sys.exit(3)", tmp_path),
        stage("last", "print('= still here =')", tmp_path),
    ]
    outcomes = list(run_all(planned, 60.0))
    assert [(o.name, o.code, o.passed, o.last_line) for o in outcomes] == [
        ("good", 0, True, "fine good"),
        ("bad", 3, False, "broken"),
        ("last", 0, True, "still here"),
    ]
    assert "FAILED (3)" in str(outcomes[1])
    assert (tmp_path / "all.log").read_text().split("\n")[:2] == ["fine good", "broken"]


def test_later_stages_have_their_reserved_time_plus_what_is_left(tmp_path: Path) -> None:
    code = "import sys; print(sys.argv[1])"
    planned = [stage(name, code, tmp_path, least=20.0) for name in "abc"]
    limits = [float(outcome.last_line) for outcome in run_all(planned, 100.0)]
    assert limits == pytest.approx([55.0, 75.0, 95.0], abs=5.0)


WAITS = """
import time
try:
    print("started", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("wrote what it had")
"""
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", child])
print("started", flush=True)
time.sleep(60)
"""


@pytest.mark.exhaustive
def test_a_stage_out_of_time_is_interrupted_and_can_write_its_results(tmp_path: Path) -> None:
    (outcome,) = run_all([stage("slow", WAITS, tmp_path)], 10.0)
    assert outcome.code is None
    assert not outcome.passed
    assert outcome.last_line == "wrote what it had"
    assert "OUT OF TIME" in str(outcome)


@pytest.mark.exhaustive
def test_a_stage_that_ignores_the_interrupt_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "GRACE", 1.0)
    start = time.monotonic()
    (outcome,) = run_all([stage("stubborn", STUBBORN, tmp_path)], 3.0)
    assert outcome.code is None
    assert time.monotonic() - start < 10.0
