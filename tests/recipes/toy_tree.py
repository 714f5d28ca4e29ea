"""A copy of the project to which both toys are added, with its CPU extension and CUDA kernels."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from building.emulated import Emulation
from building.extension import ROOT, toolchain
from building.host import host_units
from building.ninja import ninja_file, run_ninja
from building.tools import find_compiler, find_pybind11, find_torch
from building.unit import Unit
from tests.recipes.edits import SHIFT, STRIPES
from tests.support import emulator
from tests.support.edits import edited_texts

EMULATED = "build/emulator/emulated.so"
"""The emulated CUDA kernels of the copy, of which those of `VARIANT` have the toys."""
VARIANT = "half-32"
_FOLDERS = ("transformer_kernels", "csrc", "building", "tests")
_EXTENSION = f"transformer_kernels/_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def make(root: Path) -> None:
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for folder in _FOLDERS:
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    for file, text in edited_texts((*SHIFT, *STRIPES), ROOT).items():
        (root / file).write_text(text, encoding="utf-8")
    _build_extension(root)
    _build_emulated(root)


def _build_extension(root: Path) -> None:
    """Builds the CPU kernels for the portable instruction set only."""
    units = host_units("any machine", find_torch(), find_pybind11())
    _build(root, units, (), _EXTENSION)


def _build_emulated(root: Path) -> None:
    """Recompiles the operators and the kernels of `VARIANT`. The other objects are those of the
    usual library. They stand later on the link line: of an inline function in several objects, the
    linker keeps the first copy."""
    usual = emulator.build(Emulation()).parent
    units = Emulation().units(find_torch(), root)
    changed = [unit for unit in units if _is_changed(unit)]
    unchanged = [str(usual / unit.object_name) for unit in units if not _is_changed(unit)]
    _build(root, changed, (*unchanged, "-ldl"), EMULATED)


def _is_changed(unit: Unit) -> bool:
    return unit.variant in ("", VARIANT) and not unit.source.startswith("csrc/emulator/")


def _build(root: Path, units: Sequence[Unit], linked: tuple[str, ...], output: str) -> None:
    tools = toolchain(find_compiler(os.environ), find_torch(), None)
    tools = replace(tools, link_flags=(*linked, *tools.link_flags))
    # Optimisation would take longer than it saves; warnings are for the usual builds.
    units = [replace(unit, flags=(*unit.flags, "-O0", "-w")) for unit in units]
    folder = f"build/{Path(output).parent.name}"
    run_ninja(root, folder, ninja_file(units, tools, folder, output), quiet=True)
