from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# With spinning OpenMP threads the tests take ten times as long on a busy machine. The variable is
# read when torch loads OpenMP.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

# Without a GPU the Triton kernels are interpreted. Triton reads this when a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.support.backends import NAMES
from tests.support.emulated import NOT_EMULATED
from tests.support.poison import poisoned_memory


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--isa",
        metavar="NAME",
        help="instruction set of the CPU kernels: portable, avx2, avx512 or amx (default: the best "
        "that the CPU supports)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if name := config.getoption("isa"):
        from transformer_kernels import _C

        try:
            _C.force_isa(name)
        except ValueError as reason:
            raise pytest.UsageError(f"--isa {name}: {reason}") from None


def pytest_report_header() -> str:
    return f"CUDA kernels: {'emulated' if NOT_EMULATED is None else f'not run: {NOT_EMULATED}'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests marked `gpu` if there is no CUDA device."""
    if torch.cuda.is_available():
        return
    skipped = pytest.mark.skip(reason=f"needs a CUDA device; torch {torch.__version__} finds none")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skipped)


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> str:
    """Name of a backend. One that is not built raises when it is called, so no test is skipped."""
    return str(request.param)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fills uninitialized memory with NaN."""
    with poisoned_memory():
        yield


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
