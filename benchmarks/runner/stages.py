"""Runs commands in sequence, each with a log and a time limit, within a total time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.runner.record import ROOT

GRACE = 20.0
"""Seconds between SIGINT and SIGKILL for a stage that is out of time. pytest-xdist needs 10 to give
up a hanging worker and report the results of the others."""

TAIL = 30
"""Number of last log lines that an outcome keeps."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A command with a log file and reserved time."""

    name: str
    command: Callable[[float], Sequence[str]]
    """maps the time limit in seconds to a command line"""
    log: Path
    """appended to, so that stages can share it"""
    least: float
    """seconds reserved for this stage, regardless of the duration of earlier stages"""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Result of a stage."""

    name: str
    code: int | None
    """exit status; None if the stage ran out of time"""
    seconds: float
    tail: tuple[str, ...]
    """last non-empty lines of the log"""

    @property
    def last_line(self) -> str:
        return self.tail[-1].strip("= ") if self.tail else ""

    @property
    def passed(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        status = {0: "passed", None: "OUT OF TIME"}.get(self.code, f"FAILED ({self.code})")
        return f"{self.name:10} {status:12} {self.seconds:4.0f} s  {self.last_line}"


def run_all(stages: Sequence[Stage], seconds: float) -> Iterator[Outcome]:
    """Runs every stage, even after failures, and yields its outcome.

    The time limit of a stage is the rest of `seconds`, less the time reserved for later stages.
    """
    end = time.monotonic() + seconds
    for i, stage in enumerate(stages):
        reserved = sum(later.least for later in stages[i + 1 :])
        yield run(stage, end - time.monotonic() - reserved)


def run(stage: Stage, seconds: float) -> Outcome:
    """Runs one stage. At the time limit it gets SIGINT, to write its results, then SIGKILL."""
    limit = max(0.0, seconds - GRACE)
    start = time.monotonic()
    with stage.log.open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            list(stage.command(limit)),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **stage.environment},
            start_new_session=True,  # so that its child processes can be killed with it
            # A background process inherits an ignored SIGINT.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        code: int | None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = stage.log.read_text(encoding="utf-8", errors="replace").split("\n")
    tail = [line for line in lines if line.strip()][-TAIL:]
    return Outcome(stage.name, code, time.monotonic() - start, tuple(tail))
