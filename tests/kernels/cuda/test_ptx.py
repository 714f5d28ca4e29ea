"""The inline PTX: nvcc compiles the kernels of the emulator's tests, and a GPU agrees with it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from building.extension import ROOT

ARCHITECTURES = {
    "primitives": "80",
    "product": "80",
    "sm90_primitives": "90a",
    "sm90_gemm": "90a",
    "sm90_product": "90a",
}
NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc on PATH")


def nvcc(*arguments: str) -> str:
    """Runs nvcc and returns its output.

    Warnings are errors, because ptxas inserts missing wgmma waits with a warning only.
    """
    assert NVCC is not None
    command = [NVCC, "-x", "cu", "-std=c++20", "-O3", f"-I{ROOT / 'csrc'}", "-Werror"]
    command += ["all-warnings", "-Xptxas", "-warn-spills,-Werror", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def source(program: str) -> str:
    return str(Path(__file__).parent / f"programs/{program}.cpp")


@pytest.mark.exhaustive
@needs_nvcc
@pytest.mark.parametrize("program", ARCHITECTURES)
def test_kernels_of_the_emulator_tests_compile(program: str, tmp_path: Path) -> None:
    number = ARCHITECTURES[program]
    target = f"-gencode=arch=compute_{number},code=sm_{number}"
    nvcc(target, "-c", source(program), "-o", str(tmp_path / "kernels.o"))


@pytest.fixture
def ptx(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """PTX of a program, with register numbers removed."""
    path = tmp_path / "kernels.ptx"
    nvcc(
        "-gencode=arch=compute_90a,code=compute_90a", "-ptx", source(request.param), "-o", str(path)
    )
    return re.sub(r"%[a-z]+\d+", "%", path.read_text())


# The emulator does not check the operand lists and immediates of the inline PTX.
@needs_nvcc
@pytest.mark.parametrize("ptx", ["sm90_gemm"], indirect=True)
def test_operands_of_wgmma(ptx: str) -> None:
    # After c: the operands, scale-d, imm-scale-a, imm-scale-b, imm-trans-a, imm-trans-b.
    shared = {f"%, %, p, 1, 1, {a}, {b}" for a in "01" for b in "01"}
    registers = {f"{{%, %, %, %}}, %, p, 1, 1, {b}" for b in "01"}
    seen = set()
    for n in (32, 64, 96, 128, 192, 256):
        pattern = rf"wgmma\S*\.m64n{n}k16\.f32\.\S+ \{{([%, ]*)\}}, ([^;]*);"
        issues = set(re.findall(pattern, ptx))
        assert {outputs.count("%") for outputs, _ in issues} == {n // 2}
        kinds = {operands for _, operands in issues}
        assert kinds & shared
        assert kinds & registers
        assert kinds <= shared | registers
        seen |= kinds
    assert seen >= shared


@needs_nvcc
@pytest.mark.parametrize("ptx", ["sm90_primitives"], indirect=True)
def test_operands_of_tma_and_setmaxnreg(ptx: str) -> None:
    assert "setmaxnreg.dec.sync.aligned.u32 40;" in ptx
    assert "setmaxnreg.inc.sync.aligned.u32 232;" in ptx
    for rank in range(1, 6):
        at = ", ".join(["%"] * rank)
        load = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
        assert f"{load} [%], [%, {{{at}}}], [%];" in ptx
        store = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group"
        assert f"{store} [%, {{{at}}}], [%];" in ptx


@needs_nvcc
@pytest.mark.gpu
@pytest.mark.parametrize("program", ARCHITECTURES)
def test_gpu_agrees_with_scalar_computations(program: str, tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    if ARCHITECTURES[program] == "90a" and major != 9:
        pytest.skip(f"needs a device of compute capability 9.0; this one has {major}.{minor}")
    number = "90a" if major == 9 else f"{major}{minor}"
    binary = str(tmp_path / program)
    nvcc(f"-gencode=arch=compute_{number},code=sm_{number}", source(program), "-o", binary)
    command = [binary, "all", "0"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.stdout == "ok\n", result.stdout + result.stderr
