"""Libraries of the operators with edited kernels, which one process can load side by side."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from building.cuda import LINEAR_OPERATORS, OPERATORS, cuda_units, find_cuda
from building.edits import Edit, edited_texts
from building.emulated import EMULATOR_OPERATORS
from building.extension import OBJECTS, ROOT, nvcc_jobs, toolchain
from building.host import operator_units
from building.ninja import Toolchain, libraries_file, run_ninja
from building.tools import find_compiler, find_torch
from building.unit import Unit

NAMED = ("csrc/bindings/cpu_operators.cpp", OPERATORS, EMULATOR_OPERATORS)
"""Sources with the namespace of the operators, compiled for each library."""
LEFT_OUT = ("csrc/bindings/linear_operators.cpp", LINEAR_OPERATORS)
"""Operators of linear attention, whose kernels are never edited."""


@dataclass(frozen=True)
class Library:
    """The operators in a namespace of their own, with edited kernels."""

    name: str
    units: tuple[str, ...] = ()
    """names of the units of kernels that are compiled with the edits (`Unit.variant`)"""
    edits: tuple[Edit, ...] = ()
    """of headers in csrc/"""

    @property
    def namespace(self) -> str:
        return f"transformer_kernels_{self.name.replace('-', '_')}"


@dataclass(frozen=True)
class Original:
    """The build whose other objects edited libraries are linked from; it must be up to date."""

    units: Sequence[Unit]
    folder: str
    """folder of its objects, relative to ROOT"""
    output: str
    """folder of the edited libraries, their headers and objects, relative to ROOT"""
    tools: Toolchain
    nvcc_jobs: int = 1

    def headers(self, library: Library) -> str:
        """Folder of the edited headers. Other edits have another one, so that all is recompiled."""
        digest = hashlib.sha256(repr(library.edits).encode()).hexdigest()[:8]
        return f"{self.output}/headers/{library.name}-{digest}"


def extension() -> Original:
    """The extension. Raises NoCudaError if no CUDA kernels can be built."""
    compiler, torch = find_compiler(os.environ), find_torch()
    cuda = find_cuda(os.environ, torch)
    units = (*operator_units(platform.machine(), torch), *cuda_units(torch, cuda.chips))
    tools = toolchain(compiler, torch, cuda)
    return Original(units, OBJECTS, "build/tune", tools, nvcc_jobs())


def build(libraries: Sequence[Library], original: Original) -> dict[str, Path]:
    """Builds what is outdated of the libraries, all in parallel.

    Returns:
        Paths of the libraries by name.

    Raises:
        ValueError: an edit does not apply.
        CompileError: a library does not compile.
    """
    folder = original.output
    objects: dict[str, Unit] = {}
    inputs: dict[str, list[str]] = {}
    for library in libraries:
        _write_headers(library, original)
        paths = inputs[f"{folder}/{library.name}.so"] = []
        for unit in original.units:
            own = _own_unit(unit, library, original)
            if own is not None:
                paths.append(f"{folder}/{own.object_name}")
                objects[paths[-1]] = own
            elif unit.source not in LEFT_OUT:
                paths.append(f"{original.folder}/{unit.object_name}")
    text = libraries_file(inputs, objects, original.tools, folder, original.nvcc_jobs)
    run_ninja(ROOT, folder, text)
    return {library.name: ROOT / folder / f"{library.name}.so" for library in libraries}


def advice(library: Library, original: Original) -> list[str]:
    """Returns the advice of ptxas on the kernels of a library, such as C7510: wgmma products are
    serialised."""
    reports = (ROOT / original.output).rglob(f"*-{library.name}.o.ptxas")
    lines = (line for report in sorted(reports) for line in report.read_text().splitlines())
    return list(dict.fromkeys(line for line in lines if re.search(r"\(C\d{4}\)", line)))


def _write_headers(library: Library, original: Original) -> None:
    """Writes those that changed, so that ninja recompiles no others."""
    for name, text in edited_texts(library.edits, ROOT / "csrc").items():
        path = ROOT / original.headers(library) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def _own_unit(unit: Unit, library: Library, original: Original) -> Unit | None:
    """Returns the unit of this library alone; None if it shares the object of the original."""
    name = f"{unit.variant}-{library.name}".removeprefix("-")
    if unit.source in NAMED:
        flags = [flag for flag in unit.flags if not flag.startswith("-DTK_LIBRARY=")]
        return replace(unit, flags=(*flags, f"-DTK_LIBRARY={library.namespace}"), variant=name)
    if unit.variant not in library.units:
        return None
    # Searched before the folders of -I.
    headers = original.headers(library)
    if unit.compiler == "nvcc":
        return replace(unit, flags=(*unit.flags, "-Xcompiler", f"-iquote,{headers}"), variant=name)
    # The C++ compiler compiles kernels for the emulator, whose own headers come first.
    own, others = ("-iquote", f"{headers}/emulator"), ("-iquote", headers)
    return replace(unit, flags=(*own, *unit.flags, *others), variant=name)
