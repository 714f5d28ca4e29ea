"""Command-line options, collection and reports of the benchmarks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks.goals.check import MISSING, as_columns, check_goals
from benchmarks.report.device import write_report
from benchmarks.runner import target
from benchmarks.runner.record import RECORDED, UNRECORDED, as_text, longest_ago_first
from benchmarks.runner.run import Comparison, Run
from transformer_kernels.bench import VARIANTS, Budget, Provenance, device_slug, read_rows
from transformer_kernels.bench.steadiness import TOLERANCE
from transformer_kernels.bench.trial import DeviceLostError

FOLDER = Path(__file__).parent / "suites"
SUITES = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))
STANDING = ("attention", "masks", "models", "cpu", "gpu")
"""Suites that `make bench` measures."""

_RUN = pytest.StashKey[Run]()


def comparisons(suite: str) -> Iterable[Comparison]:
    """Returns the comparisons of a suite, which are those of benchmarks/suites/<suite>.py."""
    found: Iterable[Comparison] = import_module(f"benchmarks.suites.{suite}").comparisons()
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("transformer_kernels")
    group.addoption(
        "--suite",
        type=lambda text: text.split(","),
        default=list(STANDING),
        metavar="NAME[,NAME]",
        help=f"suites to measure, of {', '.join(SUITES)} (default: {','.join(STANDING)})",
    )
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
        help=f"variants to measure, of {','.join(VARIANTS)} (default: all)",
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
    target.prepare()
    if unknown := set(config.getoption("--suite")) - set(SUITES):
        raise pytest.UsageError(f"--suite: expected names of {', '.join(SUITES)}, got {unknown}")
    threads = config.getoption("--threads")
    if threads is not None:
        torch.set_num_threads(threads)
    # pytest-benchmark's table would show times of whole comparisons, which mix the variants.
    config.option.benchmark_quiet = True
    keep = config.getoption("--record")
    seconds = config.getoption("--seconds")
    config.stash[_RUN] = Run(
        Provenance.now(),
        Budget(seconds, 1, 1) if target.IS_REHEARSAL else Budget(seconds),
        folder=RECORDED if keep else config.getoption("--rows"),
        keep=keep,
        tolerance=config.getoption("--tolerance") / 100,
        variants=config.getoption("--variants"),
        time_limit=config.getoption("--time-limit"),
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = [
        pytest.param(suite, one, id=f"{suite}-{one.name.replace(' ', '_')}")
        for suite in metafunc.config.getoption("--suite")
        for one in comparisons(suite)
    ]
    metafunc.parametrize(("suite", "comparison"), chosen)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Continues the grid of the suite gpu where the last recorded run ended."""
    if config.getoption("--record") and torch.cuda.is_available():
        path = RECORDED / device_slug(torch.device("cuda")) / "gpu.csv"
        if path.is_file():
            variants = config.getoption("--variants")
            items[:] = longest_ago_first(
                items, lambda item: _comparison(item).case, read_rows(path), variants
            )


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[_RUN].selected = [_comparison(item) for item in session.items]


def _comparison(item: pytest.Item) -> Comparison:
    assert isinstance(item, pytest.Function)
    comparison = item.callspec.params["comparison"]
    assert isinstance(comparison, Comparison)
    return comparison


def pytest_exception_interact(call: pytest.CallInfo[None]) -> None:
    """Ends the run after a fault of the CUDA device."""
    if call.excinfo is not None and call.excinfo.errisinstance(DeviceLostError):
        pytest.exit(str(call.excinfo.value), returncode=3)


def pytest_report_header(config: pytest.Config) -> list[str]:
    provenance = config.stash[_RUN].provenance
    missing = {v.name: v.unavailable_reason() for v in VARIANTS.values() if v.unavailable_reason()}
    return [
        f"device {provenance.device}, {provenance.threads} threads, torch {provenance.torch}",
        *(f"not measured: {name}: {reason}" for name, reason in missing.items()),
    ]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    run = config.stash[_RUN]
    goals = [line for line in check_goals(run.rows) if line.status != MISSING]
    sections = {
        "measurements": as_text(run.rows),
        "goals": as_columns(goals) if goals else [],
        "skipped": run.skipped,
        "files": [f"rows: {os.path.relpath(path)}" for path in run.paths]
        + [_report(folder) for folder in dict.fromkeys(path.parent for path in run.paths)],
    }
    for title, lines in sections.items():
        if lines:
            terminalreporter.section(title)
            terminalreporter.write("\n".join([*lines, "", ""]))


def _report(folder: Path) -> str:
    """Writes the report of a folder; returns the names of its files, or the reason without one."""
    try:
        return f"report: {', '.join(map(os.path.relpath, write_report(folder)))}"
    except (ImportError, FileNotFoundError) as error:
        return f"report: not written: {error}"


@pytest.fixture(scope="session")
def run(pytestconfig: pytest.Config) -> Run:
    return pytestconfig.stash[_RUN]
