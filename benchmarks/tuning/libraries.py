"""Libraries of the CUDA operators with other tiles, which one process can load side by side."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from building.cuda import LINEAR_OPERATORS, OPERATORS, cuda_units, find_cuda
from building.emulated import EMULATOR_OPERATORS
from building.extension import OBJECTS, ROOT, nvcc_jobs, toolchain
from building.host import operator_units
from building.ninja import Toolchain, libraries_file, run_ninja
from building.tools import find_compiler, find_torch
from building.unit import Unit

NAMED = ("csrc/bindings/cpu_operators.cpp", OPERATORS, EMULATOR_OPERATORS)
"""Sources with the namespace of the operators, compiled for each library."""
LEFT_OUT = ("csrc/bindings/linear_operators.cpp", LINEAR_OPERATORS)
"""Operators of linear attention, whose tiles stay."""


@dataclass(frozen=True)
class Library:
    """The operators in a namespace of their own."""

    name: str
    unit: str | None = None
    """name of the unit of kernels that has another tile (`Unit.variant`)"""
    definition: str = ""
    """macro of tile_config.h with this tile, such as TK_SM90_FORWARD={2,128,3,1,40,232}"""

    @property
    def namespace(self) -> str:
        return f"transformer_kernels_{self.name.replace('-', '_')}"


@dataclass(frozen=True)
class Original:
    """The build whose other objects the libraries are linked from; it must be up to date."""

    units: Sequence[Unit]
    folder: str
    """folder of its objects, relative to ROOT"""
    output: str
    """folder of the libraries and their own objects, relative to ROOT"""
    tools: Toolchain
    nvcc_jobs: int = 1


def extension() -> Original:
    """The extension. Raises NoCudaError if no CUDA kernels can be built."""
    compiler, torch = find_compiler(os.environ), find_torch()
    cuda = find_cuda(os.environ, torch)
    units = (*operator_units(platform.machine(), torch), *cuda_units(torch, cuda.chips))
    return Original(units, OBJECTS, "build/tune", toolchain(compiler, torch, cuda), nvcc_jobs())


def build(libraries: Sequence[Library], original: Original) -> dict[str, Path]:
    """Builds what is outdated of the libraries, all in parallel.

    Returns:
        Paths of the libraries by name.

    Raises:
        CompileError: a library does not compile.
    """
    folder = original.output
    objects: dict[str, Unit] = {}
    inputs: dict[str, list[str]] = {}
    for library in libraries:
        paths = inputs[f"{folder}/{library.name}.so"] = []
        for unit in original.units:
            own = _own_unit(unit, library)
            if own is not None:
                paths.append(f"{folder}/{own.object_name}")
                objects[paths[-1]] = own
            elif unit.source not in LEFT_OUT:
                paths.append(f"{original.folder}/{unit.object_name}")
    text = libraries_file(inputs, objects, original.tools, folder, original.nvcc_jobs)
    run_ninja(ROOT, folder, text)
    return {library.name: ROOT / folder / f"{library.name}.so" for library in libraries}


def _own_unit(unit: Unit, library: Library) -> Unit | None:
    """Returns the unit of this library alone; None if it shares the object of the original."""
    name = f"{unit.variant}-{library.name}".removeprefix("-")
    if unit.source in NAMED:
        flags = [flag for flag in unit.flags if not flag.startswith("-DTK_LIBRARY=")]
        return replace(unit, flags=(*flags, f"-DTK_LIBRARY={library.namespace}"), variant=name)
    if unit.variant != library.unit:
        return None
    # nvcc splits values of -D at commas.
    comma = r"\," if unit.compiler == "nvcc" else ","
    flag = f"-D{library.definition.replace(',', comma)}"
    return replace(unit, flags=(*unit.flags, flag), variant=name)


def advice(library: Library, original: Original) -> list[str]:
    """Returns the advice of ptxas on the kernels of a library, such as C7510: wgmma products are
    serialised."""
    reports = (ROOT / original.output).rglob(f"*-{library.name}.o.ptxas")
    lines = (line for report in sorted(reports) for line in report.read_text().splitlines())
    return list(dict.fromkeys(line for line in lines if re.search(r"\(C\d{4}\)", line)))
