"""Command-line options, fixtures and reports of the benchmarks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchmarks.goals.check import MISSING, as_columns, check_goals
from benchmarks.report.device import write_report
from benchmarks.runner.checks import check_quickly
from benchmarks.runner.order import longest_ago_first
from benchmarks.runner.record import RECORDED, UNRECORDED, Recorder, as_text
from transformer_kernels.bench import (
    VARIANTS,
    Budget,
    Case,
    Provenance,
    Variant,
    device_slug,
    read_rows,
    usable_variants,
)
from transformer_kernels.bench.contenders import CheckedCase
from transformer_kernels.bench.steadiness import TOLERANCE
from transformer_kernels.bench.trial import DeviceLostError

_RECORDER = pytest.StashKey[Recorder]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("transformer_kernels")
    group.addoption(
        "--record",
        action="store_true",
        help="append the rows to benchmarks/results/<device>/<suite>.csv, for a commit",
    )
    group.addoption(
        "--rows",
        type=Path,
        default=UNRECORDED,
        metavar="DIR",
        help="without --record: folder of the rows, replacing earlier ones (default: %(default)s)",
    )
    group.addoption(
        "--tolerance",
        type=float,
        default=100 * TOLERANCE,
        metavar="PERCENT",
        help="with --record: how much slower than usual the machine may be (default: %(default)g)",
    )
    group.addoption("--threads", type=int, help="CPU threads (default: torch's choice)")
    group.addoption(
        "--variants",
        type=lambda text: text.split(","),
        default=list(VARIANTS),
        help=f"variants to measure besides naive: {','.join(VARIANTS)}",
    )
    group.addoption(
        "--seconds",
        type=float,
        default=3.0,
        help="time budget per case and direction, for all variants (default: %(default)s)",
    )
    group.addoption(
        "--time-limit",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="the suite gpu starts no further case after this time; with --record, the next run "
        "continues with cases without rows, then those measured longest ago (default: %(default)s)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    threads = config.getoption("--threads")
    if threads is not None:
        torch.set_num_threads(threads)
    # pytest-benchmark's table would show times of whole rounds, which mix the variants.
    config.option.benchmark_quiet = True
    config.stash[_RECORDER] = _new_recorder(config)


def _new_recorder(config: pytest.Config) -> Recorder:
    provenance = Provenance.now()
    keep = config.getoption("--record")
    folder = RECORDED if keep else config.getoption("--rows")
    budget = Budget(config.getoption("--seconds"))
    tolerance = config.getoption("--tolerance") / 100
    return Recorder(provenance, budget, folder=folder, keep=keep, tolerance=tolerance)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Continues the grid of the suite gpu where the last recorded run ended."""
    if not (config.getoption("--record") and torch.cuda.is_available()):
        return
    path = RECORDED / device_slug(torch.device("cuda")) / "gpu.csv"
    if path.is_file():
        variants = config.getoption("--variants")
        items[:] = longest_ago_first(items, _case_on_grid, read_rows(path), variants)


def _case_on_grid(item: pytest.Item) -> Case | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("on_grid")


def pytest_exception_interact(call: pytest.CallInfo[None]) -> None:
    """Ends the run after a fault of the CUDA device."""
    if call.excinfo is not None and call.excinfo.errisinstance(DeviceLostError):
        pytest.exit(str(call.excinfo.value), returncode=3)


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
    terminalreporter.section("measurements")
    for line in as_text(recorder.rows):
        terminalreporter.write_line(line)
    terminalreporter.write_line("")
    checks = [line for line in check_goals(recorder.rows) if line.status != MISSING]
    if checks:
        terminalreporter.section("goals")
        for line in as_columns(checks):
            terminalreporter.write_line(line)
        terminalreporter.write_line("")
    if recorder.skipped:
        terminalreporter.section("skipped")
        for line in recorder.skipped:
            terminalreporter.write_line(line)
        terminalreporter.write_line("")
    for path in recorder.paths:
        terminalreporter.write_line(f"rows: {os.path.relpath(path)}")
    for folder in dict.fromkeys(path.parent for path in recorder.paths):
        terminalreporter.write_line(f"report: {_report(folder)}")


def _report(folder: Path) -> str:
    """Writes the report of a folder; returns the names of its files, or the reason without one."""
    try:
        return ", ".join(map(os.path.relpath, write_report(folder)))
    except ImportError as error:
        return f"not written: {error}"


@pytest.fixture(scope="session")
def recorder(pytestconfig: pytest.Config) -> Recorder:
    return pytestconfig.stash[_RECORDER]


@pytest.fixture(scope="session")
def variants(pytestconfig: pytest.Config) -> list[Variant]:
    return usable_variants(dict.fromkeys(["naive", *pytestconfig.getoption("--variants")]))


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest, variants: list[Variant]) -> CheckedCase:
    """The test's case, checked once for all directions."""
    return check_quickly(request.param, variants)
