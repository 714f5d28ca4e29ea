"""The kernels for AMX with emulated tiles, on CPUs that have AVX-512."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from building.extension import ROOT
from tests.support import emulated_amx

UNAVAILABLE = emulated_amx.unavailable_reason()


def run(*words: str) -> str:
    """Output of a Python command in a new process, which must succeed."""
    command = [sys.executable, "-m", *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.exhaustive
@pytest.mark.skipif(emulated_amx.has_amx(), reason="this CPU has AMX, which all tests use")
@pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))
def test_every_case_for_amx() -> None:
    """All tests that name an instruction set, with that of AMX; otherwise they would not run."""
    output = run("pytest", "--isa", "amx", "-k", "amx", "tests/kernels/cpu", "tests/functional")
    assert "AMX: emulated by AVX-512" in output
    assert "skipped" not in output


@pytest.mark.exhaustive
@pytest.mark.skipif(not emulated_amx.has_amx(), reason="this CPU has no AMX")
@pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))
def test_emulated_tiles_have_the_bits_of_real_ones() -> None:
    real, emulated = (
        json.loads(run("tests.support.amx_bits", isa).splitlines()[-1])  # ninja prints lines, too
        for isa in ("amx", "emulated-amx")
    )
    assert len(real) > 1000
    assert [name for name in real if real[name] != emulated[name]] == []
