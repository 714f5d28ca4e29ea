"""Fixtures of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.support.backends import NAMES
from tests.support.poison import poisoned_memory


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
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is not measured: that takes a second for each row in a large process."""
    monkeypatch.setattr("transformer_kernels.bench.contenders.peak_extra_bytes", lambda *_: None)
