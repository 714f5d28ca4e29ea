from __future__ import annotations

import pytest

from transformer_kernels.backends.native.cuda_support import not_built_reason


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the Triton tests last: each compiles for seconds, and the time may be limited."""
    items.sort(key=lambda item: "triton" in item.nodeid)


@pytest.fixture(params=["cuda", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Name of a fused GPU backend. The cuda backend is skipped only if it is not built."""
    name = str(request.param)
    if name == "cuda" and (reason := not_built_reason()) is not None:
        pytest.skip(reason)
    return name
