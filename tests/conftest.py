from __future__ import annotations

import os
import sys

import pytest

# With spinning OpenMP threads the tests take ten times as long on a busy machine. The variable is
# read when torch loads OpenMP.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

# Without a GPU the Triton kernels are interpreted. Triton reads this when a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Nothing here imports transformer_kernels before pytest_configure, which chooses the extension.
from tests.support import emulated_amx
from tests.support.shares import keep_share


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--isa",
        metavar="NAME",
        help="instruction set of the CPU kernels: portable, avx2, avx512 or amx (default: the best "
        "that the CPU supports); AVX-512 emulates amx",
    )
    parser.addoption(
        "--share", metavar="K/N", help="run share K of N of the tests (default: all of them)"
    )


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("isa")
    if name == "amx" and emulated_amx.unavailable_reason() is None:
        if "transformer_kernels" in sys.modules:  # by the conftest.py of a subfolder
            raise pytest.UsageError("--isa amx, emulated: name the folder tests, choose with -k")
        emulated_amx.install()
    if name:
        from transformer_kernels import _C

        try:
            _C.force_isa(name)
        except ValueError as reason:
            raise pytest.UsageError(f"--isa {name}: {reason}") from None
    config.pluginmanager.import_plugin("tests.support.fixtures")


def pytest_report_header() -> list[str]:
    from tests.support.emulated import NOT_EMULATED

    cuda = "emulated" if NOT_EMULATED is None else f"not run: {NOT_EMULATED}"
    amx = ["AMX: emulated by AVX-512"] if emulated_amx.installed() else []
    return [f"CUDA kernels: {cuda}", *amx]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out other shares, and skips the tests marked `gpu` if there is no CUDA device."""
    if (text := config.getoption("share")) is not None:
        keep_share(text, config, items)
    if torch.cuda.is_available():
        return
    skipped = pytest.mark.skip(reason=f"needs a CUDA device; torch {torch.__version__} finds none")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skipped)
