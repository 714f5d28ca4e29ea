"""The sanitized extension in child processes: clean calls pass, faults end the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from building.extension import ROOT
from building.sanitized import toolchain
from building.tools import find_compiler, find_torch
from tests.support import sanitized

UNAVAILABLE = sanitized.unavailable_reason()
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE)),
]

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


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with the sanitized extension in a child process."""
    return subprocess.run(
        [sys.executable, "-c", START + program, str(sanitized.build())],
        cwd=ROOT,
        env=os.environ | sanitized.environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_clean_calls() -> None:
    """Every instruction set; exceptions of C++ arrive in Python."""
    result = run(CLEAN)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[:2] == ["clean:", "portable"]


@pytest.mark.parametrize("isa", ["portable", "auto"])
def test_short_tensor(isa: str) -> None:
    result = run(SHORT_TENSOR.format(isa=isa))
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


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_faults(faulty_program: Path, fault: str) -> None:
    """Faults of the workspace, whose arrays share a block, and an undefined operation."""
    environment = os.environ | sanitized.environment()
    command = [str(faulty_program), fault]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == (-signal.SIGABRT if fault else 0), result.stderr
    assert fault in result.stderr
