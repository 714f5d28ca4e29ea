"""Builds of the CPU extension in child processes. Sanitized: clean calls pass, faults end the
process. Instructions emulated by AVX-512: all cases, and the bits of the real ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from building.extension import ROOT
from building.sanitized import toolchain
from building.tools import find_compiler, find_torch
from tests.support import libraries

NO_SANITIZERS = libraries.sanitizers_unavailable_reason()
NO_EMULATION = libraries.emulation_unavailable_reason()
PRESENT = [isa for isa in libraries.EMULATED if libraries.has(isa)]
MISSING = [isa for isa in libraries.EMULATED if isa not in PRESENT]
pytestmark = pytest.mark.exhaustive
needs_sanitizers = pytest.mark.skipif(NO_SANITIZERS is not None, reason=str(NO_SANITIZERS))
needs_emulation = pytest.mark.skipif(NO_EMULATION is not None, reason=str(NO_EMULATION))

START = """
import sys
from pathlib import Path
from tests.support import libraries
libraries.install_extension(Path(sys.argv[1]))
import torch
import transformer_kernels as tk
from transformer_kernels import _C
from transformer_kernels.problem.fields import FIELDS
assert _C.__file__ == sys.argv[1]
q, k, v = (torch.randn(1, 2, 70, 20, requires_grad=True) for _ in range(3))
"""

CLEAN = """
def run_all():
    empty = tk.Mask.key_range(torch.tensor([2**63 - 1]), torch.tensor([-2**63]))
    padding = tk.Mask.padding(torch.tensor([33]))
    for mask in (tk.Mask.causal(), tk.Mask.window(-9, 5), padding, empty):
        tk.attention(q[:, :, :5].detach(), k.detach(), v.detach(), mask=mask, backend="cpu")
        tk.attention(q, k, v, mask=mask, dropout_p=0.1, backend="cpu").sum().backward()
        tk.attention(q, k, v, mask=mask, softcap=9.0, backend="cpu").sum().backward()
    rows, starts = (x[0].transpose(0, 1) for x in (q, k, v)), torch.tensor([0, 0, 3, 70])
    tk.attention_varlen(*rows, cu_seqlens_q=starts, cu_seqlens_k=starts).sum().backward()
    tk.attention_decode(q[:, :, :1].detach(), k.detach(), v.detach(), torch.tensor([41]))

def refusal(call, *arguments):
    try:
        call(*arguments)
    except (RuntimeError, ValueError) as error:
        return type(error).__name__
    return None

assert refusal(_C.force_isa, "none") == "ValueError"
wrong = (q.detach(), k[:, :, :9].detach(), v.detach())
arguments = (*wrong, *(field.default for field in FIELDS))
assert refusal(torch.ops.transformer_kernels.attention_forward, *arguments) == "RuntimeError"
features, isas = _C.cpu_features(), []
for isa in _C.built_isas():
    if refusal(_C.force_isa, isa) is None:
        for poisoned in (False, True):
            _C.want_poison(poisoned)
            run_all()
        isas.append(isa)
print("clean:", *isas)
"""

SHORT_TENSOR = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
elements = k.numel()
memory = libc.malloc(ctypes.c_size_t(4 * elements - 4))
short = torch.frombuffer((ctypes.c_float * elements).from_address(memory), dtype=torch.float32)
_C.force_isa({isa!r})
with torch.no_grad():
    tk.attention(q, short.view(k.shape), v, backend="cpu")
"""
"""A tensor one element longer than its memory. The kernels read it to its end."""

FAULTY_PROGRAM = """
#include <climits>
#include <string>

#include "common/workspace.h"
#include "cpu/engine/arena.h"

int main(int, char** argv) {
  const std::string fault = argv[1];
  float* last;
  {
    const tk::Workspace workspace(4096);
    tk::cpu::Arena arena{static_cast<char*>(workspace.data())};
    float* const array = tk::cpu::allocate<float>(arena, 16);
    last = tk::cpu::allocate<float>(arena, 10) + 9;
    *last = 1;
    if (fault == "use-after-poison") array[16] = 1;
    if (fault == "heap-buffer-overflow") static_cast<char*>(workspace.data())[4096] = 1;
  }
  if (fault == "heap-use-after-free") *last = 1;
  volatile int sum = INT_MAX;
  if (fault == "signed integer overflow") sum = sum + 1;
}
"""


def run(*command: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | environment
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def run_sanitized(program: str) -> subprocess.CompletedProcess[str]:
    words = ("-c", START + program, str(libraries.build_sanitized()))
    return run(sys.executable, *words, environment=libraries.sanitized_environment())


@needs_sanitizers
def test_clean_calls() -> None:
    """Every instruction set; exceptions of C++ arrive in Python."""
    result = run_sanitized(CLEAN)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[:2] == ["clean:", "portable"]


@needs_sanitizers
@pytest.mark.parametrize("isa", ["portable", "auto"])
def test_short_tensor(isa: str) -> None:
    result = run_sanitized(SHORT_TENSOR.format(isa=isa))
    assert result.returncode == -signal.SIGABRT
    assert "heap-buffer-overflow" in result.stderr
    assert "csrc/cpu" in result.stderr


@pytest.fixture(scope="module")
def faulty_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FAULTY_PROGRAM, built with the flags of the extension."""
    folder = tmp_path_factory.mktemp("faulty")
    source, program = folder / "faulty.cpp", folder / "faulty"
    source.write_text(FAULTY_PROGRAM)
    compiler = find_compiler(os.environ)
    flags = toolchain(compiler, find_torch()).cxx_flags
    command = [*compiler, *flags, str(source), "csrc/common/workspace.cpp", "-o", str(program)]
    subprocess.run(command, cwd=ROOT, check=True)
    return program


FAULTS = (
    "use-after-poison",
    "heap-buffer-overflow",
    "heap-use-after-free",
    "signed integer overflow",
)


@needs_sanitizers
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_faults(faulty_program: Path, fault: str) -> None:
    """Faults of the workspace, whose arrays share a block, and an undefined operation."""
    result = run(str(faulty_program), fault, environment=libraries.sanitized_environment())
    assert result.returncode == (-signal.SIGABRT if fault else 0), result.stderr
    assert fault in result.stderr


CHECKSUMS = """
import itertools, json, sys, zlib
import torch
from tests.support import libraries
libraries.choose_isa(sys.argv[1])
from tests.support.cases import CASES

def checksum(x):
    x = x.masked_fill(x.isnan(), torch.nan).contiguous()
    return zlib.crc32(x.view(torch.uint8).numpy().tobytes())

torch.set_num_threads(1)
dtypes = torch.float32, torch.bfloat16, torch.float16
print(json.dumps({
    f"{case}-{dtype}-{name}": checksum(x)
    for case, dtype in itertools.product(CASES, dtypes)
    for name, x in case.run(case.inputs(dtype), "cpu").items()
}))
"""
"""Prints the checksum of each output of each case by an instruction set. All NaN are equal."""


def output_of(*words: str) -> str:
    result = run(sys.executable, *words, environment={})
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@needs_emulation
@pytest.mark.skipif(not MISSING, reason="this CPU has both, which all tests use")
def test_every_case_for_instruction_sets_that_are_missing() -> None:
    """All tests that name an instruction set, with those; otherwise they would not run."""
    folders = ("tests/kernels/cpu", "tests/contract")
    output = output_of("-m", "pytest", "--isa", MISSING[0], "-k", " or ".join(MISSING), *folders)
    assert "emulated by AVX-512" in output
    assert "skipped" not in output


@needs_emulation
@pytest.mark.skipif(not PRESENT, reason="this CPU has neither")
@pytest.mark.parametrize("isa", PRESENT)
def test_emulated_instructions_have_the_bits_of_real_ones(isa: str) -> None:
    real, emulated = (
        json.loads(output_of("-c", CHECKSUMS, name).splitlines()[-1])  # ninja prints lines, too
        for name in (isa, f"emulated-{isa}")
    )
    # The multiply-adds of other dtypes are compiled with other flags, and contracted otherwise.
    compared = [name for name in real if isa == "amx" or "bfloat16" in name]
    assert len(compared) > 1000
    assert [name for name in compared if real[name] != emulated[name]] == []
