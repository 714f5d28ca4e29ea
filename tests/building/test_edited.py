"""Libraries with edited kernels: headers, units and the ninja file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from building import edited, edits
from building.chips import Chips
from building.cuda import OPERATORS, cuda_units
from building.edited import Library, Original
from building.edits import Edit
from building.emulated import EMULATOR, Emulation
from building.extension import ROOT
from building.host import operator_units
from building.ninja import Toolchain
from building.tools import Torch

TORCH = Torch("2.13.0", Path("torch"))
CHIPS = Chips(((9, 0),), ptx=False, hopper=True)
UNITS = (*operator_units("x86_64", TORCH), *cuda_units(TORCH, CHIPS))
TOOLS = Toolchain(("c++",), (), (), ("nvcc",))
TILES = "cuda/common/tile_config.h"
EDIT = Edit(TILES, "kLargeArch = 800;", "kLargeArch = 900;")
WIDE = Library("wide-tiles", ("bfloat16-128-128",), (EDIT,))
SAME = Library("same")


@pytest.fixture
def original(tmp_path: Path) -> Original:
    return Original(UNITS, "build/original", str(tmp_path), TOOLS)


@pytest.fixture
def manifest(monkeypatch: pytest.MonkeyPatch, original: Original, tmp_path: Path) -> list[str]:
    """Lines of the ninja file of both libraries, which is not run."""
    found: list[str] = []
    monkeypatch.setattr(edited, "run_ninja", lambda *arguments: found.append(arguments[2]))
    paths = edited.build([WIDE, SAME], original)
    assert paths == {one.name: tmp_path / f"{one.name}.so" for one in (WIDE, SAME)}
    return [line.strip().replace(str(tmp_path), "out") for line in found[0].split("\n")]


def test_only_the_operators_and_the_edited_unit_are_compiled(manifest: list[str]) -> None:
    compiled = [line for line in manifest if ": compile" in line]
    kernels = "csrc/cuda/sm90/kernels"
    assert compiled == [
        "build out/csrc/bindings/cpu_operators-wide-tiles.o: compile "
        "csrc/bindings/cpu_operators.cpp",
        f"build out/csrc/bindings/cuda_operators-wide-tiles.o: compile {OPERATORS}",
        f"build out/{kernels}-bfloat16-128-128-wide-tiles.o: compile_cuda {kernels}.cu",
        "build out/csrc/bindings/cpu_operators-same.o: compile csrc/bindings/cpu_operators.cpp",
        f"build out/csrc/bindings/cuda_operators-same.o: compile {OPERATORS}",
    ]


def test_edited_headers_are_searched_first(manifest: list[str], original: Original) -> None:
    at = next(i for i, line in enumerate(manifest) if "bfloat16-128-128-wide-tiles.o:" in line)
    folder = original.headers(WIDE)
    assert manifest[at + 1].endswith(f"-Xcompiler -iquote,{folder}".replace(original.output, "out"))
    assert EDIT.new in (Path(folder) / TILES).read_text()


def test_headers_of_the_emulator_are_searched_before_others(
    monkeypatch: pytest.MonkeyPatch, original: Original
) -> None:
    emulated = replace(original, units=Emulation().units(TORCH, ROOT))
    found: list[str] = []
    monkeypatch.setattr(edited, "run_ninja", lambda *arguments: found.append(arguments[2]))
    edited.build([WIDE], emulated)
    flags = found[0].partition("bfloat16-128-128-wide-tiles.o:")[2].splitlines()[1]
    folder = original.headers(WIDE)
    assert re.findall(r"-iquote (\S+)", flags) == [f"{folder}/emulator", EMULATOR, folder]


def test_each_library_has_its_own_namespace(manifest: list[str]) -> None:
    flags = [line for line in manifest if "TK_LIBRARY" in line]
    assert [line.rpartition("-DTK_LIBRARY=")[2] for line in flags] == [
        *["transformer_kernels_wide_tiles"] * 2,
        *["transformer_kernels_same"] * 2,
    ]


def test_libraries_share_the_other_objects_in_the_same_order(manifest: list[str]) -> None:
    wide, same = (
        [word.replace(f"-{one.name}.o", ".o") for word in line.split()[3:]]
        for one in (WIDE, SAME)
        for line in manifest
        if line.startswith(f"build out/{one.name}.so: link ")
    )
    assert [path.removeprefix("out/").removeprefix("build/original/") for path in wide] == [
        path.removeprefix("out/").removeprefix("build/original/") for path in same
    ]
    assert "build/original/csrc/cuda/sm90/kernels-bfloat16-64-64.o" in wide
    assert "build/original/csrc/cuda/sm90/kernels-bfloat16-128-128.o" in same
    assert not any("linear_" in path and "operators" in path for path in wide)


def test_edits_of_one_header_are_applied_in_turn() -> None:
    further = Edit(TILES, "kLargeArch = 900;", "kLargeArch = 1000;")
    text = edits.edited_texts((EDIT, further), ROOT / "csrc")[TILES]
    before = (ROOT / "csrc" / TILES).read_text()
    assert text == before.replace("kLargeArch = 800;", "kLargeArch = 1000;")


@pytest.mark.parametrize("old", ["no such text", "constexpr"])
def test_an_edit_that_does_not_apply_once_is_an_error(old: str) -> None:
    with pytest.raises(ValueError, match="times, not 1"):
        edits.edited_texts((Edit(TILES, old, ""),), ROOT / "csrc")


def test_other_edits_have_another_folder(original: Original) -> None:
    other = Library(WIDE.name, WIDE.units, (Edit(TILES, EDIT.old, "kLargeArch = 1000;"),))
    assert len({original.headers(library) for library in (SAME, WIDE, other)}) == 3


def test_advice_of_ptxas_is_found_by_library(original: Original, tmp_path: Path) -> None:
    advice = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions"
    report = tmp_path / "csrc/cuda/sm90/kernels-bfloat16-128-128-wide-tiles.o.ptxas"
    report.parent.mkdir(parents=True)
    report.write_text(f"ptxas info    : 0 bytes gmem\n{advice}\n{advice}\n")
    assert edited.advice(WIDE, original) == [advice]
    assert edited.advice(SAME, original) == []
