"""The real instructions: nvcc takes what the emulator takes, and a GPU computes the same."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.cuda.emulator_programs import KERNELS, ROOT

ARCHITECTURES = {
    "primitives": "80",
    "product": "80",
    "sm90_primitives": "90a",
    "sm90_product": "90a",
}
NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc on PATH")


def nvcc(*arguments: str) -> str:
    """What it prints. Warnings are errors: ptxas mends missing waits for wgmma with one."""
    assert NVCC is not None
    command = [NVCC, "-x", "cu", "-std=c++20", "-O3", f"-I{ROOT / 'csrc/cuda'}", "-Werror"]
    command += ["all-warnings", "-Xptxas", "-warn-spills,-Werror", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def source(program: str) -> str:
    return str(KERNELS / f"{program}.cpp")


@needs_nvcc
@pytest.mark.parametrize("program", ARCHITECTURES)
def test_kernels_of_the_emulator_compile(program: str, tmp_path: Path) -> None:
    number = ARCHITECTURES[program]
    target = f"-gencode=arch=compute_{number},code=sm_{number}"
    nvcc(target, "-c", source(program), "-o", str(tmp_path / "kernels.o"))


# The immediates of an instruction are not seen by the emulator.
@needs_nvcc
def test_immediates_reach_the_instructions(tmp_path: Path) -> None:
    path = tmp_path / "kernels.ptx"
    nvcc("-gencode=arch=compute_90a,code=compute_90a", "-ptx", source("sm90_primitives"), "-o",
         str(path))  # fmt: skip
    ptx = path.read_text()
    for n in (32, 64, 96, 128, 192, 256):
        issues = re.findall(rf"wgmma\S*\.m64n{n}k16\.f32\.\S+ \{{([^}}]*)\}}, ([^;]*);", ptx)
        assert issues
        assert all(outputs.count("%f") == n // 2 for outputs, _ in issues)
        # Operands, then scale-d; a and b not negated; whether each is transposed.
        rest = {re.sub(r"%\w+", "%", operands) for _, operands in issues}
        assert rest <= {f"%, %, p, 1, 1, {a}, {b}" for a in "01" for b in "01"} | {
            f"{{%, %, %, %}}, %, p, 1, 1, {b}" for b in "01"
        }
    assert re.search(r"setmaxnreg\.dec\.sync\.aligned\.u32 40;", ptx)
    assert re.search(r"setmaxnreg\.inc\.sync\.aligned\.u32 232;", ptx)
    for rank in range(1, 6):
        at = ", ".join(["%"] * rank)
        copies = re.sub(r"%\w+", "%", ptx)
        load = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global"
        assert f"{load}.mbarrier::complete_tx::bytes [%], [%, {{{at}}}], [%];" in copies
        for store in ("async.bulk.tensor", "reduce.async.bulk.tensor"):
            kind = ".add.bulk_group" if "reduce" in store else ".bulk_group"
            wanted = f"cp.{store}.{rank}d.global.shared::cta{kind} [%, {{{at}}}], [%];"
            assert wanted in copies


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
    "sm90_primitives": (
        "wgmma_widths",
        "wgmma_layouts",
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
        result = subprocess.run([binary, case, "0"], capture_output=True, text=True, check=False)
        assert result.stdout == "ok\n", f"{case}: {result.stdout}{result.stderr}"
