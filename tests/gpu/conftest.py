from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

from transformer_kernels.backends.native.cuda_support import not_built_reason


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the Triton tests last: each compiles for seconds, and the time may be limited."""
    items.sort(key=lambda item: "triton" in item.nodeid)


@pytest.fixture(autouse=True)
def _the_device_is_not_lost() -> Iterator[None]:
    """Ends the process after a kernel fault: later tests would fail too and hide the cause."""
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            pytest.exit(f"the device is lost to this process: {error}", returncode=3)
        time.sleep(1)  # lets pytest-xdist send the report of the test
        os._exit(3)  # pytest-xdist reports the test and continues in a new process


@pytest.fixture(params=["cuda", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Name of a fused GPU backend. The cuda backend is skipped only if it is not built."""
    name = str(request.param)
    if name == "cuda" and (reason := not_built_reason()) is not None:
        pytest.skip(reason)
    return name


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Enables deterministic algorithms, which bit-identical gradients require."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
