"""Generators of calls by name, and campaigns: one draws calls, runs them, shrinks what fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from tests.fuzz.calls import Call
from tests.fuzz.hostile.calls import hostile_calls
from tests.fuzz.process import ExecutorProcess, Failure
from tests.fuzz.valid.bits import bits_calls
from tests.fuzz.valid.draw import decode, delta, dense, linear, sdpa, valid_calls, varlen

Generators = dict[str, Callable[[], SearchStrategy[Call]]]


def _cpu() -> SearchStrategy[Call]:
    """Nearly half of the calls are of `attention`, which has the most options."""
    return valid_calls("cpu", dense, dense, dense, varlen, decode, sdpa, linear, delta)


GENERATORS: Generators = {
    "cpu": _cpu,
    "cuda": lambda: valid_calls("cuda", dense, dense, varlen, decode, linear),
    "triton": lambda: valid_calls("triton", dense, varlen, decode, linear, delta),
    "reference": lambda: valid_calls("reference", dense, varlen, decode, linear, delta),
    "bits": lambda: bits_calls(("cpu", "cpu", "cpu", "cpu", "cuda", "triton")),
    "hostile": lambda: hostile_calls(("auto", "cpu", "auto", "cpu", "reference", "cuda", "triton")),
}
"""The emulator runs "cuda", Triton's interpreter "triton". "reference" guards the oracle: both are
plain torch, written apart."""
SANITIZED: Generators = {
    "cpu": _cpu,
    "bits": lambda: bits_calls(("cpu",)),
    "hostile": lambda: hostile_calls(("auto", "cpu")),
}
"""Generators of calls of the extension: sanitizers see nothing of the other backends."""


def generators(sanitize: bool) -> Generators:
    return SANITIZED if sanitize else GENERATORS


CALLS_PER_SEED = 400
SHRINK_SECONDS = 60.0
MAX_FINDINGS = 5
"""A campaign ends after this many findings: fix them first."""

_SETTINGS = settings(
    max_examples=CALLS_PER_SEED,
    database=None,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.quiet,
)


@dataclass(frozen=True)
class Finding:
    """A call that fails, shrunk, and the seed that found it."""

    seed: int
    call: Call
    failure: Failure


@dataclass
class Report:
    name: str
    calls: int = 0
    seeds: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


class _StopError(BaseException):
    """Ends a hypothesis run; hypothesis catches every Exception."""


@dataclass
class _Batch:
    """The calls of one seed. After the first failure only failures of its kind count."""

    executor: ExecutorProcess
    end: float
    calls: int = 0
    failed: list[tuple[Call, Failure]] = field(default_factory=list)
    shrink_end: float = 0.0

    def run(self, call: Call) -> None:
        if time.monotonic() > (self.shrink_end if self.failed else self.end):
            raise _StopError
        self.calls += 1
        failure = self.executor.run(call)
        if failure is None or (self.failed and failure.signature != self.failed[0][1].signature):
            return
        if not self.failed:
            self.shrink_end = time.monotonic() + SHRINK_SECONDS
        self.failed.append((call, failure))
        raise AssertionError(failure.text)

    def smallest(self) -> tuple[Call, Failure]:
        """The shortest call that failed, the latest of several: shrinking makes numbers smaller."""
        return min(reversed(self.failed), key=lambda pair: len(repr(pair[0])))


def run_campaign(name: str, seconds: float, first_seed: int, sanitize: bool = False) -> Report:
    """Runs calls of a generator for some seconds, CALLS_PER_SEED for each seed, ascending.

    Shrinking a failure may take SHRINK_SECONDS more.
    """
    report, calls = Report(name), generators(sanitize)[name]()
    with closing(ExecutorProcess(sanitize)) as executor:
        end = time.monotonic() + seconds
        while time.monotonic() < end and len(report.findings) < MAX_FINDINGS:
            number = first_seed + len(report.seeds)
            batch = _Batch(executor, end)
            run = seed(number)(_SETTINGS(given(calls)(batch.run)))
            # Flaky: a failure that did not come again.
            with suppress(_StopError, AssertionError, Flaky):
                run()
            report.seeds.append(number)
            report.calls += batch.calls
            if batch.failed:
                report.findings.append(Finding(number, *batch.smallest()))
    return report
