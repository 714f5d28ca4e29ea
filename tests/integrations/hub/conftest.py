"""Kernels of `make hub`, as HuggingFace's packages load them. `make test-hub` runs these tests."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from building.hub import local_kernels

os.environ["LOCAL_KERNELS"] = local_kernels()
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`make test-hub` installs `kernels` and builds what it loads."""
    if find_spec("kernels") is not None:
        return
    own = [item for item in items if Path(__file__).parent in item.path.parents]
    config.hook.pytest_deselected(items=own)
    items[:] = [item for item in items if item not in own]
