"""The CPU extension with AMX emulated by AVX-512: for `pytest --isa amx` on a CPU without AMX, and
for `pytest --isa emulated-amx` on any CPU with AVX-512.

See csrc/cpu/engine/amx_tiles_emulated.h. The other instruction sets are those of the package.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest
import torch

from building.extension import toolchain
from building.tools import find_compiler, find_torch
from tests.support import libraries

FLAGS = ("-DTK_EMULATE_AMX", "-O2")  # -O2 compiles in half the time of -O3
AVX512 = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")

_installed = False


def unavailable_reason() -> str | None:
    """The reason why AMX cannot be emulated, or None."""
    features = torch.cpu.get_capabilities()
    if not all(features.get(name) for name in AVX512):
        return "this CPU lacks AVX-512"
    if not find_compiler(os.environ):
        return "no C++ compiler on PATH"
    return None


def choose(isa: str | None) -> None:
    """Makes the CPU kernels those of an instruction set, "emulated-amx" included; None: the best.

    Raises:
        pytest.UsageError: the CPU lacks the instruction set.
    """
    if isa == "emulated-amx" or (isa == "amx" and not has_amx()):
        if (reason := unavailable_reason()) is not None:
            raise pytest.UsageError(f"--isa {isa}: {reason}")
        if "transformer_kernels" in sys.modules:  # by the conftest.py of a subfolder
            raise pytest.UsageError(f"--isa {isa}, emulated: name the folder tests, choose with -k")
        _install()
        isa = "amx"
    if isa is not None:
        from transformer_kernels import _C

        try:
            _C.force_isa(isa)
        except ValueError as error:
            raise pytest.UsageError(f"--isa {isa}: {error}") from None


def has_amx() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def _install() -> None:
    """Builds the extension and loads it, before transformer_kernels is imported."""
    global _installed
    normal = toolchain(find_compiler(os.environ), find_torch(), None)
    tools = replace(normal, cxx_flags=(*normal.cxx_flags, *FLAGS))
    path = libraries.build_extension("build/emulated_amx/_C.so", tools, "emulated AMX")
    libraries.install_extension(path)
    _installed = True


def installed() -> bool:
    return _installed
