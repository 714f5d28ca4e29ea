"""The lid on `make test`: recorded durations of the tests, and the budgets of their folders.

tests/durations.json has the mean seconds of an item of each test function, in the sample of the
quick tier ("quick") and beyond it ("rest"). `make durations` writes it. tests/budget.toml has the
core-seconds that a folder may spend in the quick tier, as seconds of a reference machine. Seconds
of other machines are converted by the time of a fixed loop (`calibrate`), which is recorded too.
"""

from __future__ import annotations

import json
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any

import pytest
import torch
from _pytest.subtests import SubtestReport

from building.extension import ROOT

DURATIONS = ROOT / "tests/durations.json"
BUDGET = ROOT / "tests/budget.toml"
UNMEASURED = 1.0
"""Seconds of the reference machine that a function without a record counts."""
CHEAP = 1.0
"""A function whose sample takes at most so many of these seconds needs no marker `quick`."""
NOISE = 1.25
"""Share of the elapsed time that is allowed with --hold-elapsed: machines are shared."""


def calibrate() -> float:
    """Returns the seconds of a fixed loop of interpreted Python and small tensors, as in the tests:
    the median of fifteen tries."""
    return median(_loop() for _ in range(15))


def _loop() -> float:
    start = time.perf_counter()
    total = torch.zeros(())
    for n in range(4000):
        total = total + sum(i * n % 7 for i in range(64)) * torch.ones(16, 16).sum()
    assert total > 0
    return time.perf_counter() - start


@dataclass(frozen=True)
class Budget:
    """Limits of the quick tier, in seconds of the reference machine."""

    calibration: float
    """Seconds that `calibrate` takes there"""
    elapsed: float
    """Limit of `make test` on two cores, without set-up and build"""
    folders: Mapping[str, float]
    """Core-seconds of each folder of tests"""

    @staticmethod
    def read() -> Budget:
        return Budget(**tomllib.loads(BUDGET.read_text(encoding="utf-8")))

    def folder(self, name: str) -> str:
        """Returns the folder that pays for a test. Raises UsageError for tests in no folder."""
        found = [one for one in self.folders if name.startswith(f"tests/{one}{one and '/'}")]
        if not found:
            raise pytest.UsageError(f"{name}: tests/budget.toml has no budget for its folder")
        return max(found, key=len)


@dataclass(frozen=True)
class Records:
    """The recorded durations: seconds of the machine that measured them."""

    machine: str
    calibration: float
    quick: Mapping[str, float] = field(default_factory=dict)
    rest: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def read() -> Records:
        stored = json.loads(DURATIONS.read_text(encoding="utf-8"))
        for tier in ("quick", "rest"):
            stored[tier] = {
                f"{file}::{test}": seconds
                for file, tests in stored[tier].items()
                for test, seconds in tests.items()
            }
        return Records(**stored)

    def write(self) -> None:
        text = ",\n".join(
            f'"{name}": {_by_file(value) if isinstance(value, Mapping) else json.dumps(value)}'
            for name, value in vars(self).items()
        )
        DURATIONS.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def _by_file(seconds: Mapping[str, float]) -> str:
    files = defaultdict[str, dict[str, float]](dict)
    for name, one in sorted(seconds.items()):
        file, _, test = name.partition("::")
        files[file][test] = one
    lines = (f' "{file}": {json.dumps(tests)}' for file, tests in files.items())
    return "{\n" + ",\n".join(lines) + "\n}"


def function_of(name: str) -> str:
    """Returns the node id of a test without its parameters."""
    return name.partition("[")[0]


@dataclass(frozen=True)
class Costs:
    """Seconds of the reference machine that functions take in the quick tier."""

    budget: Budget
    records: Records

    @staticmethod
    def read() -> Costs:
        return Costs(Budget.read(), Records.read())

    def of(self, function: str, items: int) -> float:
        """Returns the cost of so many items of a function."""
        seconds = self.records.quick.get(function)
        if seconds is None:
            return UNMEASURED
        return items * seconds * self.budget.calibration / self.records.calibration

    def is_cheap(self, function: str, items: int) -> bool:
        return function in self.records.quick and self.of(function, items) <= CHEAP

    def check(self, names: Iterable[str]) -> None:
        """Raises UsageError if these items cost more than the budget of a folder."""
        spent = defaultdict[str, dict[str, float]](dict)
        for function, items in Counter(map(function_of, names)).items():
            spent[self.budget.folder(function)][function] = self.of(function, items)
        over = [
            _excess(folder, costs, self.budget.folders[folder])
            for folder, costs in sorted(spent.items())
            if sum(costs.values()) > self.budget.folders[folder]
        ]
        if over:
            raise pytest.UsageError("the quick tier exceeds its budget\n" + "\n".join(over))


def _excess(folder: str, costs: Mapping[str, float], limit: float) -> str:
    total = sum(costs.values())
    dearest = sorted(costs, key=lambda function: -costs[function])[:5]
    return (
        f"tests/{folder}: {total:.1f} s of {limit:g}, {total - limit:.1f} too many (core-seconds "
        "of the reference machine, tests/budget.toml). The dearest:\n"
        + "\n".join(f"  {costs[function]:6.1f}  {function}" for function in dearest)
    )


class OverBudget(pytest.Item):
    """Item that fails with the message: pytest-xdist does not show the UsageError of a worker."""

    def __init__(self, *, message: str, **options: Any) -> None:
        super().__init__(**options)
        self._message = message

    def runtest(self) -> None:
        pytest.fail(self._message, pytrace=False)


class Clock:
    """Plugin of the process that reports: measures each item and the whole session."""

    def __init__(self, config: pytest.Config) -> None:
        self._option = config.getoption
        self._seconds = defaultdict[str, float](float)
        self._before = calibrate()
        self._start = time.perf_counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not isinstance(report, SubtestReport):  # its item includes it
            self._seconds[report.nodeid] += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._elapsed = time.perf_counter() - self._start
        self._calibration = max(self._before, calibrate())
        self._budget = Budget.read()
        if self._option("record_durations") and session.exitstatus == 0:
            self._write()
        is_slow = self._reference_seconds > NOISE * self._budget.elapsed
        if is_slow and self._option("hold_elapsed"):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @property
    def _reference_seconds(self) -> float:
        return self._elapsed * self._budget.calibration / self._calibration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._option("tier") == "quick":
            terminalreporter.write_line(
                f"quick tier: {self._elapsed:.0f} s, {sum(self._seconds.values()):.0f} "
                f"core-seconds of tests; {self._reference_seconds:.0f} s on the reference machine, "
                f"where {self._budget.elapsed:g} are allowed"
            )

    def _write(self) -> None:
        records = Records.read()
        tier = "rest" if self._option("tier") == "rest" else "quick"
        scale = records.calibration / self._calibration
        items = defaultdict[str, list[float]](list)
        for name, seconds in self._seconds.items():
            items[function_of(name)].append(scale * seconds)
        means = {function: round(mean(each), 3) for function, each in items.items()}
        recorded = getattr(records, tier) | means
        changed: dict[str, Any] = {tier: {n: s for n, s in recorded.items() if _exists(n)}}
        replace(records, **changed).write()


def _exists(function: str) -> bool:
    file, _, name = function.rpartition("::")
    path = ROOT / file.partition("::")[0]
    return path.exists() and f"def {name}(" in path.read_text(encoding="utf-8")
