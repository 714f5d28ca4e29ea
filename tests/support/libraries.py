"""Shared objects that only tests use: their builds, and the CPU extension with other flags, under
sanitizers or with emulated AMX. Nothing here imports transformer_kernels before it is chosen."""

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


EMULATED_AMX_FLAGS = ("-DTK_EMULATE_AMX", "-O2")  # -O2 compiles in half the time of -O3
AVX512 = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")
_amx_is_emulated = False


def emulated_amx_unavailable_reason() -> str | None:
    """The reason why AMX cannot be emulated by AVX-512, or None if it can."""
    features = torch.cpu.get_capabilities()
    if not all(features.get(name) for name in AVX512):
        return "this CPU lacks AVX-512"
    if not find_compiler(os.environ):
        return "no C++ compiler on PATH"
    return None


def choose_isa(isa: str | None) -> None:
    """Makes the CPU kernels those of an instruction set, "emulated-amx" included; None: the best.

    "amx" is emulated on a CPU without it (csrc/cpu/engine/amx_tiles_emulated.h); the other
    instruction sets are then those of the package.

    Raises:
        ValueError: the CPU lacks the instruction set.
    """
    if isa == "emulated-amx" or (isa == "amx" and not has_amx()):
        if (reason := emulated_amx_unavailable_reason()) is not None:
            raise ValueError(reason)
        if "transformer_kernels" in sys.modules:  # by the conftest.py of a subfolder
            raise ValueError("to emulate it, name the folder tests, and choose with -k")
        _install_emulated_amx()
        isa = "amx"
    if isa is not None:
        from transformer_kernels import _C

        _C.force_isa(isa)


def has_amx() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def amx_is_emulated() -> bool:
    return _amx_is_emulated


def _install_emulated_amx() -> None:
    global _amx_is_emulated
    normal = extension.toolchain(find_compiler(os.environ), find_torch(), None)
    tools = replace(normal, cxx_flags=(*normal.cxx_flags, *EMULATED_AMX_FLAGS))
    install_extension(_build_extension("build/emulated_amx/_C.so", tools, "emulated AMX"))
    _amx_is_emulated = True
