"""The CPU extension under AddressSanitizer and UndefinedBehaviorSanitizer, for child processes.

A parent process calls `build` and starts a child with `environment`; the child calls `install`
before it imports transformer_kernels. A fault is reported on stderr and ends the child by SIGABRT.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path

import torch  # noqa: F401  loads the libraries that the extension is linked to
from setuptools.errors import PlatformError

from building.extension import ROOT
from building.host import host_units
from building.ninja import ninja_file, run_ninja
from building.sanitized import find_library, find_runtime, toolchain
from building.tools import find_compiler, find_pybind11, find_torch

FOLDER = "build/sanitized"
NAME = "transformer_kernels._C"


def unavailable_reason() -> str | None:
    """The reason why the sanitized extension cannot be built and run, or None if it can."""
    if sys.platform != "linux":
        return "the runtime of the sanitizers is preloaded as on Linux"
    try:
        find_runtime(find_compiler(os.environ))
    except PlatformError as reason:
        return str(reason)
    return None


def build() -> Path:
    """Builds the extension if it is outdated. A lock serialises the processes of pytest-xdist."""
    found, library = find_torch(), ROOT / FOLDER / "_C.so"
    tools = toolchain(find_compiler(os.environ), found)
    library.parent.mkdir(parents=True, exist_ok=True)
    with (ROOT / FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        objects = host_units(platform.machine(), found, find_pybind11())
        if not library.exists():
            print(f"compiling the sanitized extension in {FOLDER}", flush=True)
        run_ninja(ROOT, FOLDER, ninja_file(objects, tools, FOLDER, f"{FOLDER}/_C.so"), quiet=True)
    return library


def environment() -> dict[str, str]:
    """Environment variables of a child process that loads the extension."""
    compiler = find_compiler(os.environ)
    # Python is linked neither to the runtime, which must be loaded first, nor to the C++ library,
    # whose __cxa_throw the runtime looks up at the start.
    libraries = (find_runtime(compiler), find_library(compiler, "libstdc++.so.6"))
    return {
        "LD_PRELOAD": ":".join(str(path) for path in libraries if path is not None),
        # Leaks: Python keeps memory to its end. Null for an absurd size: torch then raises.
        "ASAN_OPTIONS": "abort_on_error=1:detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "abort_on_error=1:print_stacktrace=1",
        # Without Python's own allocator, uses of freed objects are detected.
        "PYTHONMALLOC": "malloc",
        # The emulator switches stacks, which AddressSanitizer does not follow.
        "TRANSFORMER_KERNELS_EMULATOR": "0",
    }


def install(path: Path) -> None:
    """Loads this file as transformer_kernels._C, before transformer_kernels is imported."""
    assert "transformer_kernels" not in sys.modules, "install() comes too late"
    loader = ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
