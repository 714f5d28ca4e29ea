from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

from transformer_kernels.backends.native.cuda_support import not_built_reason


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a limited time should reach comes first: Triton compiles for seconds a test."""
    items.sort(key=lambda item: "triton" in item.nodeid)


@pytest.fixture(autouse=True)
def _the_device_is_not_lost() -> Iterator[None]:
    """After a fault of a kernel every call of its process fails, which would hide whose it was."""
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            pytest.exit(f"the device is lost to this process: {error}", returncode=3)
        time.sleep(1)  # the test's own report is on its way
        os._exit(3)  # pytest-xdist says which test it was, and goes on with a new process


@pytest.fixture(params=["cuda", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Every fused backend that runs here. One that must run and cannot fails its tests."""
    name = str(request.param)
    if name == "cuda" and (reason := not_built_reason()) is not None:
        pytest.skip(reason)
    return name


@pytest.fixture
def deterministic() -> Iterator[None]:
    """What the contract asks for before it promises the same bits."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
