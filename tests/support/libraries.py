"""Shared objects that only tests use: their builds, and the CPU extension with other flags."""

from __future__ import annotations

import fcntl
import importlib.util
import platform
import sys
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader
from pathlib import Path

import torch  # noqa: F401  loads the libraries that the extension is linked to

from building.extension import ROOT
from building.host import host_units
from building.ninja import Toolchain, ninja_file, run_ninja
from building.tools import find_pybind11, find_torch
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


def build_extension(output: str, tools: Toolchain, name: str) -> Path:
    """Builds the CPU extension with the flags of `tools`."""
    units = host_units(platform.machine(), find_torch(), find_pybind11())
    return build(output, units, tools, name)


def install_extension(path: Path) -> None:
    """Loads this file as transformer_kernels._C, before transformer_kernels is imported."""
    assert "transformer_kernels" not in sys.modules, "transformer_kernels is already imported"
    loader = ExtensionFileLoader(EXTENSION, str(path))
    spec = importlib.util.spec_from_file_location(EXTENSION, path, loader=loader)
    assert spec is not None
    module = sys.modules[EXTENSION] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
