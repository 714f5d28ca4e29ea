"""Commands one after another, each with a log and a time limit, within a time for all."""

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
"""Seconds from the interrupt of a stage that is out of time to its end by force. pytest-xdist takes
10 to give up a worker that hangs, and then says what the others found"""

TAIL = 30
"""Lines that an outcome keeps of a log"""


@dataclass(frozen=True, kw_only=True)
class Stage:
    name: str
    command: Callable[[float], Sequence[str]]
    """From the seconds that it has"""
    log: Path
    """Extended: stages may share one"""
    least: float
    """The seconds that are kept for it, whatever the stages before it take"""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a stage ended."""

    name: str
    code: int | None
    """Its exit status; None where it ran out of time"""
    seconds: float
    tail: tuple[str, ...]
    """The last lines of its log, without empty ones"""

    @property
    def last_line(self) -> str:
        return self.tail[-1].strip("= ") if self.tail else ""

    @property
    def passed(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        verdict = {0: "passed", None: "OUT OF TIME"}.get(self.code, f"FAILED ({self.code})")
        return f"{self.name:10} {verdict:12} {self.seconds:4.0f} s  {self.last_line}"


def run_all(stages: Sequence[Stage], seconds: float) -> Iterator[Outcome]:
    """Runs every stage, whether or not those before it passed.

    A stage has what is left of `seconds`, less what is kept for those after it.
    """
    end = time.monotonic() + seconds
    for i, stage in enumerate(stages):
        kept = sum(later.least for later in stages[i + 1 :])
        yield run(stage, end - time.monotonic() - kept)


def run(stage: Stage, seconds: float) -> Outcome:
    """Interrupts a stage that is out of time, so that it writes what it has, and then ends it."""
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
            start_new_session=True,  # so that its own processes can be ended with it
            # Who runs in the background ignores interrupts, and so would it.
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
