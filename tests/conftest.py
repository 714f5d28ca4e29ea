from __future__ import annotations

import os
from collections.abc import Callable, Generator
from importlib.util import find_spec
from typing import TypeVar

import pytest
from _pytest.skipping import evaluate_skip_marks

# With spinning OpenMP threads the tests take ten times as long on a busy machine. The variable is
# read when torch loads OpenMP.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

# Without a GPU the Triton kernels are interpreted. Triton reads this when a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Nothing here imports transformer_kernels before pytest_configure, which chooses the extension.
from tests.support import libraries
from tests.support.budget import Clock, Costs, OverBudget
from tests.support.shares import Share

R = TypeVar("R", pytest.TestReport, pytest.CollectReport)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--isa",
        metavar="NAME",
        help="instruction set of the CPU kernels: portable, avx2, avx512, avx512_bf16 or amx "
        "(default: the best of this CPU); AVX-512 emulates the last two where they are missing, "
        "and emulated-avx512_bf16 and emulated-amx always",
    )
    parser.addoption(
        "--tier",
        choices=("quick", "new", "rest"),
        help="quick: what `make test` runs; new: also tests without a record of their duration; "
        "rest: all but quick (default: all tests)",
    )
    parser.addoption(
        "--share", metavar="K/N", help="run share K of N of the tests (default: all of them)"
    )
    parser.addoption(
        "--allow-skips", action="store_true", help="a skip in the quick tier is no error"
    )
    parser.addoption(
        "--hold-elapsed", action="store_true", help="fail if the tier exceeds its elapsed time"
    )
    parser.addoption(
        "--record-durations", action="store_true", help="write those of the tier to durations.json"
    )


def pytest_configure(config: pytest.Config) -> None:
    isa = config.getoption("isa")
    try:
        libraries.choose_isa(isa)
    except ValueError as error:
        raise pytest.UsageError(f"--isa {isa}: {error}") from None
    config.pluginmanager.import_plugin("tests.support.fixtures")
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
        from tests.support import triton_interpreter

        triton_interpreter.install()
    # A worker of pytest-xdist does not report.
    if config.getoption("tier") is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Clock(config))


def pytest_report_header() -> list[str]:
    from tests.support.backends import NOT_EMULATED

    cuda = "emulated" if NOT_EMULATED is None else f"not run: {NOT_EMULATED}"
    isas = ["AMX and vdpbf16ps: emulated by AVX-512"] if libraries.is_emulated() else []
    gpu = [] if torch.cuda.is_available() else ["tests marked gpu: deselected, no CUDA device"]
    return [f"CUDA kernels: {cuda}", *isas, *gpu]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests that can run here, of the chosen tier and share."""
    from tests.support.tiers import dearest_first, quick_items

    if not (torch.cuda.is_available() or config.option.collectonly):
        _keep(items, lambda item: item.get_closest_marker("gpu") is None)
    tier, share = config.getoption("tier"), config.getoption("share")
    if tier is None and share is None:
        return
    costs = Costs.read()
    if tier == "quick":
        _keep(items, lambda item: evaluate_skip_marks(item) is None)
    if tier is not None:
        quick = set(quick_items(items, costs, new=tier == "new"))
        _keep(items, lambda item: (item.nodeid in quick) == (tier != "rest"))
    if tier == "quick":
        try:
            costs.check(item.nodeid for item in items)
        except pytest.UsageError as error:
            if not hasattr(config, "workerinput"):
                raise
            over = OverBudget.from_parent(items[0].session, name="budget", message=str(error))
            items[:] = [over]
            return
    if share is not None:
        try:
            own = Share.parse(share).of([item.nodeid for item in items], costs.records.rest)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        _keep(items, lambda item: item.nodeid in own)
    if tier is not None:
        dearest_first(items, costs.records.rest if tier == "rest" else costs.records.quick)


def _keep(items: list[pytest.Item], wanted: Callable[[pytest.Item], bool]) -> None:
    if items:
        items[0].config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = [item for item in items if wanted(item)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _without_skip(item.config, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _without_skip(collector.config, (yield))


def _without_skip(config: pytest.Config, report: R) -> R:
    """Turns a skip in the quick tier into a failure."""
    is_quick = config.getoption("tier") == "quick"
    if report.skipped and is_quick and not config.getoption("allow_skips"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: {reason}. The quick tier has no skips: deselect it"
    return report
