"""Shared objects that only tests use: their builds, and the CPU extension with other flags, under
sanitizers or with emulated instructions. Nothing here imports transformer_kernels before it is
chosen."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import ExtensionFileLoader
from pathlib import Path

import torch
from setuptools.errors import PlatformError

from building import extension, sanitized
from building.extension import ROOT
from building.host import host_units
from building.ninja import Toolchain, ninja_file, run_ninja
from building.tools import find_compiler, find_torch
from building.unit import Unit

EXTENSION = "transformer_kernels._C"


def build(output: str, units: Sequence[Unit], tools: Toolchain, name: str) -> Path:
    """Builds a library such as "build/sanitized/_C.so" if it is outdated. Its folder holds the
    objects. A lock serialises the processes of pytest-xdist."""
    library = ROOT / output
    folder = str(Path(output).parent)
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            print(f"compiling {name} in {folder}", flush=True)
        run_ninja(ROOT, folder, ninja_file(units, tools, folder, output), quiet=True)
    return library


def _build_extension(output: str, tools: Toolchain, name: str) -> Path:
    units = host_units(platform.machine(), find_torch())
    return build(output, units, tools, name)


def install_extension(path: Path) -> None:
    """Loads this file as transformer_kernels._C, before transformer_kernels is imported."""
    assert "transformer_kernels" not in sys.modules, "transformer_kernels is already imported"
    loader = ExtensionFileLoader(EXTENSION, str(path))
    spec = importlib.util.spec_from_file_location(EXTENSION, path, loader=loader)
    assert spec is not None
    module = sys.modules[EXTENSION] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)


def sanitizers_unavailable_reason() -> str | None:
    """The reason why the sanitized extension cannot be built and run, or None if it can."""
    if sys.platform != "linux":
        return "the runtime of the sanitizers is preloaded as on Linux"
    try:
        sanitized.find_runtime(find_compiler(os.environ))
    except PlatformError as reason:
        return str(reason)
    return None


def build_sanitized() -> Path:
    """Builds the extension under AddressSanitizer and UndefinedBehaviorSanitizer if it is outdated.

    A child process with `sanitized_environment` installs it. A fault is reported on stderr and ends
    the child by SIGABRT.
    """
    tools = sanitized.toolchain(find_compiler(os.environ), find_torch())
    return _build_extension("build/sanitized/_C.so", tools, "the sanitized extension")


def sanitized_environment() -> dict[str, str]:
    compiler = find_compiler(os.environ)
    # Python is linked neither to the runtime, which must be loaded first, nor to the C++ library,
    # whose __cxa_throw the runtime looks up at the start.
    preloaded = (
        sanitized.find_runtime(compiler),
        sanitized.find_library(compiler, "libstdc++.so.6"),
    )
    return {
        "LD_PRELOAD": ":".join(str(path) for path in preloaded if path is not None),
        # Leaks: Python keeps memory to its end. Null for an absurd size: torch then raises.
        "ASAN_OPTIONS": "abort_on_error=1:detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "abort_on_error=1:print_stacktrace=1",
        # Without Python's own allocator, uses of freed objects are detected.
        "PYTHONMALLOC": "malloc",
        # The emulator switches stacks, which AddressSanitizer does not follow.
        "TRANSFORMER_KERNELS_EMULATOR": "0",
    }


EMULATED = ("avx512_bf16", "amx")
"""Instruction sets whose products of bfloat16 AVX-512 emulates."""

EMULATED_FLAGS = ("-DTK_EMULATE_BFLOAT16", "-O2")  # -O2 compiles in half the time of -O3
AVX512 = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")
_is_emulated = False


def emulation_unavailable_reason() -> str | None:
    """The reason why AVX-512 cannot emulate AMX and vdpbf16ps, or None if it can."""
    features = torch.cpu.get_capabilities()
    if not all(features.get(name) for name in AVX512):
        return "this CPU lacks AVX-512"
    if not find_compiler(os.environ):
        return "no C++ compiler on PATH"
    return None


def choose_isa(isa: str | None) -> None:
    """Makes the CPU kernels those of an instruction set, "emulated-amx" included; None: the best.

    Those of `EMULATED` are emulated on a CPU without them (csrc/cpu/engine/dot.h,
    amx_tiles_emulated.h); the other instruction sets are then those of the package.

    Raises:
        ValueError: the CPU lacks the instruction set.
    """
    if isa is None:
        return
    name = isa.removeprefix("emulated-")
    if name in EMULATED and (name != isa or not has(name)):
        if (reason := emulation_unavailable_reason()) is not None:
            raise ValueError(reason)
        if "transformer_kernels" in sys.modules:  # by the conftest.py of a subfolder
            raise ValueError("to emulate it, name the folder tests, and choose with -k")
        _install_emulated()
        isa = name
    from transformer_kernels import _C

    _C.force_isa(isa)


def has(isa: str) -> bool:
    """Whether this CPU has one of `EMULATED`."""
    features = torch.cpu.get_capabilities()
    return bool(features.get({"amx": "amx_bf16"}.get(isa, isa)))


def is_emulated() -> bool:
    return _is_emulated


def _install_emulated() -> None:
    global _is_emulated
    normal = extension.toolchain(find_compiler(os.environ), find_torch(), None)
    tools = replace(normal, cxx_flags=(*normal.cxx_flags, *EMULATED_FLAGS))
    install_extension(_build_extension("build/emulated_isas/_C.so", tools, "emulated kernels"))
    _is_emulated = True
