"""The real instructions: nvcc takes what the emulator takes, and a GPU computes the same."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from building.extension import ROOT
from tests.csrc.cuda.emulator_programs import KERNELS

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
    """What it prints. Warnings are errors: ptxas mends missing waits for wgmma with one."""
    assert NVCC is not None
    command = [NVCC, "-x", "cu", "-std=c++20", "-O3", f"-I{ROOT / 'csrc'}", "-Werror"]
    command += ["all-warnings", "-Xptxas", "-warn-spills,-Werror", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def source(program: str) -> str:
    return str(KERNELS / f"{program}.cpp")


@pytest.mark.exhaustive
@needs_nvcc
@pytest.mark.parametrize("program", ARCHITECTURES)
def test_kernels_of_the_emulator_compile(program: str, tmp_path: Path) -> None:
    number = ARCHITECTURES[program]
    target = f"-gencode=arch=compute_{number},code=sm_{number}"
    nvcc(target, "-c", source(program), "-o", str(tmp_path / "kernels.o"))


@pytest.fixture
def ptx(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """What nvcc makes of a program, registers without their numbers."""
    path = tmp_path / "kernels.ptx"
    nvcc(
        "-gencode=arch=compute_90a,code=compute_90a", "-ptx", source(request.param), "-o", str(path)
    )
    return re.sub(r"%[a-z]+\d+", "%", path.read_text())


# The emulator sees no immediates and no operands.
@needs_nvcc
@pytest.mark.parametrize("ptx", ["sm90_gemm"], indirect=True)
def test_wgmma_gets_its_operands(ptx: str) -> None:
    # After c and the operands scale-d, that neither is negated, and whether each is transposed.
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
def test_copies_and_registers_get_their_operands(ptx: str) -> None:
    assert "setmaxnreg.dec.sync.aligned.u32 40;" in ptx
    assert "setmaxnreg.inc.sync.aligned.u32 232;" in ptx
    for rank in range(1, 6):
        at = ", ".join(["%"] * rank)
        load = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
        assert f"{load} [%], [%, {{{at}}}], [%];" in ptx
        to_global = f"bulk.tensor.{rank}d.global.shared::cta"
        assert f"cp.async.{to_global}.bulk_group [%, {{{at}}}], [%];" in ptx
        assert f"cp.reduce.async.{to_global}.add.bulk_group [%, {{{at}}}], [%];" in ptx


CASES = {
    "primitives": (
        "shuffles",
        "barriers_and_atomics",
        "grids",
        "turns",
        "matrix_loads",
        "matrix_loads_transposed",
        "products_half",
        "products_bfloat16",
    ),
    "product": ("right",),
    "sm90_gemm": ("wgmma_widths", "wgmma_layouts"),
    "sm90_primitives": (
        "tensor_copies",
        "bulk_copies",
        "phases",
        "registers_and_elect",
        "matrix_stores",
    ),
    "sm90_product": ("right",),
}


@needs_nvcc
@pytest.mark.gpu
@pytest.mark.parametrize("program", CASES)
def test_a_gpu_computes_what_the_emulator_does(program: str, tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    if ARCHITECTURES[program] == "90a" and major != 9:
        pytest.skip(f"needs a device of compute capability 9.0; this one has {major}.{minor}")
    number = "90a" if major == 9 else f"{major}{minor}"
    binary = str(tmp_path / program)
    nvcc(f"-gencode=arch=compute_{number},code=sm_{number}", source(program), "-o", binary)
    for case in CASES[program]:
        command = [binary, case, "0"]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        assert result.stdout == "ok\n", f"{case}: {result.stdout}{result.stderr}"
