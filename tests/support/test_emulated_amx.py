"""The kernels for AMX with emulated tiles, on CPUs that have AVX-512 but no AMX."""

from __future__ import annotations

import subprocess
import sys

import pytest

from building.extension import ROOT
from tests.support import emulated_amx

UNAVAILABLE = emulated_amx.unavailable_reason()


@pytest.mark.exhaustive
@pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))
def test_every_case_for_amx() -> None:
    """All tests that name an instruction set, with that of AMX; otherwise they would be skipped."""
    command = [sys.executable, "-m", "pytest", "--isa", "amx", "-k", "amx"]
    result = subprocess.run(
        [*command, "tests/csrc/cpu", "tests/functional"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "AMX: emulated by AVX-512" in result.stdout
    assert "skipped" not in result.stdout
