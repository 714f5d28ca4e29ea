from __future__ import annotations

import os
from pathlib import Path

import pytest

from building.tools import find_compiler
from tests.kernels.cuda.emulator_programs import Programs


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """C++ programs that run kernels in the emulator, each built at its first use."""
    if not (compiler := find_compiler(os.environ)):
        pytest.skip("needs a C++ compiler on PATH")
    base = tmp_path_factory.getbasetemp()
    # Workers of pytest-xdist share the parent of their temporary folders.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder: Path = shared / "emulator"
    folder.mkdir(exist_ok=True)
    return Programs(folder, compiler)
