"""Fixtures of all tests."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

from tests.support.backends import ISAS, NAMES, forced_isa
from tests.support.runtime import poisoned_memory


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> str:
    """Name of a backend. One that is not built raises when it is called, so no test is skipped."""
    return str(request.param)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fills uninitialized memory with NaN."""
    with poisoned_memory():
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_compiled_code(tmp_path_factory: pytest.TempPathFactory) -> None:
    """torch.compile's on-disk cache does not notice that an operator has other results than before:
    it returns code for the old ones."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture(autouse=True)
def _the_device_is_not_lost(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the process after a kernel fault on a GPU: later tests would fail too and hide the
    cause."""
    yield
    if request.node.get_closest_marker("gpu") is None:
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            pytest.exit(f"the device is lost to this process: {error}", returncode=3)
        time.sleep(1)  # lets pytest-xdist send the report of the test
        os._exit(3)  # pytest-xdist reports the test and continues in a new process


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Forces each compiled instruction set in turn."""
    with forced_isa(request.param):
        yield request.param


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is not measured: that takes a second for each row in a large process."""
    monkeypatch.setattr("transformer_kernels.bench.contenders.peak_extra_bytes", lambda *_: None)
