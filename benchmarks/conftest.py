"""Options, and what happens before and after the benchmarks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchmarks.goals.check import MISSING, as_columns, judge
from benchmarks.runner.measure import CheckedCase, check
from benchmarks.runner.record import RECORDED, UNRECORDED, Recorder, as_text
from transformer_kernels.bench import VARIANTS, Budget, Provenance, Variant, usable_variants

_RECORDER = pytest.StashKey[Recorder]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("transformer_kernels")
    group.addoption(
        "--record",
        action="store_true",
        help="append the rows to benchmarks/results/<device>/<suite>.csv, to be committed",
    )
    group.addoption(
        "--rows",
        type=Path,
        default=UNRECORDED,
        metavar="DIR",
        help="else, the folder whose files of the run before are replaced (default: %(default)s)",
    )
    group.addoption("--threads", type=int, help="CPU threads (default: torch's choice)")
    group.addoption(
        "--variants",
        type=lambda text: text.split(","),
        default=list(VARIANTS),
        help=f"what to measure besides naive, of {','.join(VARIANTS)}",
    )
    group.addoption(
        "--seconds",
        type=float,
        default=3.0,
        help="for each case and direction, all variants together (default: %(default)s)",
    )
    group.addoption(
        "--time-limit",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="after which the suite gpu begins no further case (default: %(default)s)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    threads = config.getoption("--threads")
    if threads is not None:
        torch.set_num_threads(threads)
    # pytest-benchmark's table would show the times of rounds, which mix the variants.
    config.option.benchmark_quiet = True
    config.stash[_RECORDER] = _new_recorder(config)


def _new_recorder(config: pytest.Config) -> Recorder:
    provenance = Provenance.now()
    keep = config.getoption("--record")
    folder = RECORDED if keep else config.getoption("--rows")
    budget = Budget(config.getoption("--seconds"))
    return Recorder(provenance, budget, folder=folder, keep=keep)


def pytest_report_header(config: pytest.Config) -> list[str]:
    provenance = config.stash[_RECORDER].provenance
    missing = {v.name: v.unavailable_reason() for v in VARIANTS.values() if v.unavailable_reason()}
    return [
        f"device {provenance.device}, {provenance.threads} threads, torch {provenance.torch}",
        *(f"not measured: {name}: {reason}" for name, reason in missing.items()),
    ]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    recorder = config.stash[_RECORDER]
    if not recorder.rows:
        return
    terminalreporter.section("measured, the variants of each case in turn")
    for line in as_text(recorder.rows):
        terminalreporter.write_line(line)
    terminalreporter.write_line("")
    judged = [line for line in judge(recorder.rows) if line.verdict != MISSING]
    if judged:
        terminalreporter.section("goals")
        for line in as_columns(judged):
            terminalreporter.write_line(line)
        terminalreporter.write_line("")
    if recorder.left_out:
        terminalreporter.section("left out")
        for line in recorder.left_out:
            terminalreporter.write_line(line)
        terminalreporter.write_line("")
    for path in recorder.paths:
        terminalreporter.write_line(f"rows: {os.path.relpath(path)}")


@pytest.fixture(scope="session")
def recorder(pytestconfig: pytest.Config) -> Recorder:
    return pytestconfig.stash[_RECORDER]


@pytest.fixture(scope="session")
def variants(pytestconfig: pytest.Config) -> list[Variant]:
    return usable_variants(dict.fromkeys(["naive", *pytestconfig.getoption("--variants")]))


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest, variants: list[Variant]) -> CheckedCase:
    """The case that the test is parametrized by; made once for all directions."""
    return check(request.param, variants)
