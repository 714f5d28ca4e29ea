"""The CPU extension with AMX emulated by AVX-512, for `pytest --isa amx` on a CPU without AMX.

See csrc/cpu/engine/amx_tiles_emulated.h. The other instruction sets are those of the package.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from building.extension import toolchain
from building.tools import find_compiler, find_torch
from tests.support import libraries

FLAGS = ("-DTK_EMULATE_AMX", "-O2")  # -O2 compiles in half the time of -O3
AVX512 = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")

_installed = False


def unavailable_reason() -> str | None:
    """The reason why AMX is not emulated, or None if it can be."""
    features = torch.cpu.get_capabilities()
    if features.get("amx_bf16"):
        return "this CPU has AMX"
    if not all(features.get(name) for name in AVX512):
        return "this CPU lacks AVX-512"
    if not find_compiler(os.environ):
        return "no C++ compiler on PATH"
    return None


def install() -> None:
    """Builds the extension and loads it, before transformer_kernels is imported."""
    global _installed
    normal = toolchain(find_compiler(os.environ), find_torch(), None)
    tools = replace(normal, cxx_flags=(*normal.cxx_flags, *FLAGS))
    path = libraries.build_extension("build/emulated_amx/_C.so", tools, "emulated AMX")
    libraries.install_extension(path)
    _installed = True


def installed() -> bool:
    return _installed
