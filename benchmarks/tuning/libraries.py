"""Libraries of the CUDA operators with other tiles, which one process can load side by side.

A library has one unit of kernels. Calls of other widths or dtypes raise RuntimeError.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from building.cuda import OPERATORS, cuda_units, find_cuda
from building.emulated import EMULATOR_OPERATORS
from building.extension import OBJECTS, ROOT, nvcc_jobs, toolchain
from building.host import operator_units, stable_abi
from building.ninja import Toolchain, libraries_file, run_ninja
from building.tools import find_compiler, find_torch
from building.unit import Unit

SCHEMAS, ABSENT = "benchmarks/tuning/schemas.cpp", "benchmarks/tuning/absent.cpp"
NAMED = (SCHEMAS, OPERATORS, EMULATOR_OPERATORS)
"""Sources with the namespace of the operators, compiled for each library."""
CALLS = tuple(f"csrc/bindings/{name}.cpp" for name in ("operator_call", "linear_call", "tensors"))
COMMON = ("csrc/common/options.cpp", "csrc/common/workspace.cpp")
OUTPUT = "build/tune"
"""Folder of the libraries, relative to ROOT."""
KERNELS = ("csrc/cuda/sm80/kernels.cu", "csrc/cuda/sm90/kernels.cu")


@dataclass(frozen=True)
class Library:
    """The operators in a namespace of their own."""

    name: str
    unit: str
    """name of its unit of kernels (`Unit.variant`)"""
    definition: str = ""
    """macro of tile_config.h with another tile, such as TK_SM90_FORWARD={2,128,3,1,40,232}; empty
    for the present one"""

    @property
    def namespace(self) -> str:
        return f"transformer_kernels_{self.name.replace('-', '_')}"

    def path(self, folder: str) -> Path:
        """Path of the library in a folder relative to ROOT."""
        return ROOT / folder / f"{self.name}.so"


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
    units = units_of((*operator_units(platform.machine(), torch), *cuda_units(torch, cuda.chips)))
    return Original(
        (Unit(SCHEMAS, stable_abi(torch)), *units),
        OBJECTS,
        OUTPUT,
        toolchain(compiler, torch, cuda),
        nvcc_jobs(),
    )


def units_of(units: Iterable[Unit]) -> tuple[Unit, ...]:
    """Returns the units that attention on CUDA needs, without those of linear attention."""
    folders = ("csrc/cuda", "csrc/emulator")
    return tuple(
        unit
        for unit in units
        if unit.source in (OPERATORS, *CALLS, *COMMON)
        or (unit.source.startswith(folders) and "/linear/" not in unit.source)
    )


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
            paths.append(f"{folder if own else original.folder}/{(own or unit).object_name}")
            if own is not None:
                objects[paths[-1]] = own
    text = libraries_file(inputs, objects, original.tools, folder, original.nvcc_jobs)
    run_ninja(ROOT, folder, text)
    return {library.name: library.path(folder) for library in libraries}


def _own_unit(unit: Unit, library: Library) -> Unit | None:
    """Returns the unit that is compiled here; None if the library has the original's object."""
    name = f"{unit.variant}-{library.name}".removeprefix("-")
    if unit.source in NAMED:
        flags = [flag for flag in unit.flags if not flag.startswith("-DTK_LIBRARY=")]
        return replace(unit, flags=(*flags, f"-DTK_LIBRARY={library.namespace}"), variant=name)
    if unit.source in KERNELS and unit.variant != library.unit:
        return replace(unit, source=ABSENT)
    if unit.source not in KERNELS or not library.definition:
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
