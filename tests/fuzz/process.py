"""An executor in a child process, started again after a crash or a hang."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.calls import Call
from tests.fuzz.executor import OK, READY
from tests.support import libraries

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 600.0
"""The first start may compile the emulator or the sanitized extension."""
CALL_SECONDS = 120.0
"""A call takes milliseconds, or seconds in an interpreter on a busy machine."""
_SHOWN = 4000
"""Characters of stderr in a finding."""


@dataclass(frozen=True)
class Failure:
    """A call that failed: "wrong", "crash" or "hang", and what is known about it."""

    kind: str
    text: str

    @property
    def signature(self) -> tuple[str, str]:
        """Failures with different signatures have different causes."""
        return self.kind, re.split("[:\n]", self.text)[0]


class ExecutorProcess:
    """Runs calls in a child process, which is started at once. `close` ends it."""

    def __init__(self, sanitize: bool = False) -> None:
        """`sanitize` loads the extension that is built with sanitizers."""
        self._command = [sys.executable, "-m", "tests.fuzz.executor"]
        self._environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
        if sanitize:
            self._command.append(str(libraries.build_sanitized()))
            self._environment |= libraries.sanitized_environment()
        self._child: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 - close()
        self._start()

    def close(self) -> None:
        self._stop()
        self._errors.close()

    def run(self, call: Call) -> Failure | None:
        """Runs a call. Returns None if its check passes."""
        child = self._child or self._start()
        assert child.stdin is not None
        try:
            print(repr(call), file=child.stdin, flush=True)
        except BrokenPipeError:
            return self._ended()
        answer = self._answer(child, CALL_SECONDS)
        if answer is None:
            self._stop()
            return Failure("hang", f"no answer in {CALL_SECONDS:.0f} s")
        if not answer:
            return self._ended()
        return None if answer == OK else Failure("wrong", str(json.loads(answer)))

    def _start(self) -> subprocess.Popen[str]:
        self._errors.seek(0)
        self._errors.truncate()
        self._child = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        if self._answer(self._child, START_SECONDS) != READY:
            self._stop()
            raise RuntimeError(f"the executor does not start:\n{self._error_text()}")
        return self._child

    def _answer(self, child: subprocess.Popen[str], seconds: float) -> str | None:
        """One line; "" if the child has ended, None if it does not answer in time."""
        assert child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        return child.stdout.readline().rstrip("\n")

    def _ended(self) -> Failure:
        status = self._stop(kill=False)
        name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return Failure("crash", f"{name}\n{self._error_text()}".rstrip())

    def _error_text(self) -> str:
        """The sanitizer's report, or the last that the child wrote to stderr."""
        self._errors.seek(0)
        text = self._errors.read()
        reports = [text.find(mark) for mark in ("ERROR: AddressSanitizer", "runtime error:")]
        first = min((at for at in reports if at >= 0), default=len(text) - _SHOWN)
        return text[max(first, 0) :][:_SHOWN]

    def _stop(self, kill: bool = True) -> int:
        """Ends the child. Returns its exit status."""
        child, self._child = self._child, None
        if child is None:
            return 0
        if kill:
            child.kill()
        status = child.wait()
        assert child.stdin is not None
        assert child.stdout is not None
        with suppress(BrokenPipeError):
            child.stdin.close()
        child.stdout.close()
        return status
