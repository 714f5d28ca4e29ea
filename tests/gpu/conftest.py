from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from transformer_kernels.backends import CudaBackend


@pytest.fixture(params=["cuda", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Every fused backend that runs here. One that must run and cannot fails its tests."""
    name = str(request.param)
    if name == "cuda" and (reason := CudaBackend.why_not_built()) is not None:
        pytest.skip(reason)
    return name


@pytest.fixture
def deterministic() -> Iterator[None]:
    """What the contract asks for before it promises the same bits."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
