"""Tuning without a GPU: libraries and tables of the CUDA kernels, candidates of Triton's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.tuning import cuda, libraries, triton
from benchmarks.tuning.cuda import TILES, Group, Result, Tiles, conclusion, libraries_of
from benchmarks.tuning.libraries import ABSENT, KERNELS, SCHEMAS, Original, units_of
from benchmarks.tuning.triton import Shape
from building.chips import Chips
from building.cuda import OPERATORS, cuda_units
from building.emulated import Emulation
from building.extension import ROOT
from building.host import operator_units
from building.ninja import Toolchain
from building.tools import Torch, find_torch
from building.unit import Unit
from tests.support import emulator
from tests.tools.bench.example import PROVENANCE
from transformer_kernels.backends.native.cuda import HOPPER_SWITCH
from transformer_kernels.backends.triton import config, target
from transformer_kernels.backends.triton.config import CHIPS, Tile
from transformer_kernels.bench import Budget, Case, Ratio
from transformer_kernels.masks.mask import Mask

GROUP, OTHER = Group("sm90", "fwd", 128, 128), Group("sm80", "bwd", 64, 64)
PRESENT, AGAIN, WIDE = libraries_of(GROUP, {"wide": "{2,128,3}"})
LENGTH = 400
"""Several blocks of keys of every tile, the last of them partial."""

TORCH = Torch("2.13.0", Path("torch"))
UNITS = (
    Unit(SCHEMAS),
    *units_of(
        (
            *operator_units("x86_64", TORCH),
            *cuda_units(TORCH, Chips(((9, 0),), ptx=False, hopper=True)),
        )
    ),
)


def manifest(units: Sequence[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Lines of the ninja file of two libraries, which is not run."""
    found: list[str] = []
    monkeypatch.setattr(libraries, "run_ninja", lambda *arguments: found.append(arguments[2]))
    tools = Toolchain(("c++",), (), (), ("nvcc",))
    original = Original(units, "build/original", str(tmp_path), tools)  # type: ignore[arg-type]
    paths = libraries.build([WIDE, AGAIN], original)
    assert paths == {one.name: tmp_path / f"{one.name}.so" for one in (WIDE, AGAIN)}
    return [line.strip().replace(str(tmp_path), "out") for line in found[0].split("\n")]


def test_only_the_operators_and_the_unit_of_a_tile_are_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = manifest(UNITS, monkeypatch, tmp_path)
    kernels, own = "csrc/cuda/sm90/kernels", "sm90-fwd-128-wide"
    schemas, operators = (name.removesuffix(".cpp") for name in (SCHEMAS, OPERATORS))
    compiled = [line for line in lines if ": compile" in line and ABSENT not in line]
    assert compiled == [
        f"build out/{schemas}-{own}.o: compile {SCHEMAS}",
        f"build out/{operators}-{own}.o: compile {OPERATORS}",
        f"build out/{kernels}-bfloat16-128-128-{own}.o: compile_cuda {kernels}.cu",
        f"build out/{schemas}-sm90-fwd-128-again.o: compile {SCHEMAS}",
        f"build out/{operators}-sm90-fwd-128-again.o: compile {OPERATORS}",
    ]
    at = next(i for i, line in enumerate(lines) if f"128-128-{own}.o:" in line)
    assert lines[at + 1].endswith(r"'-DTK_SM90_FORWARD={2\,128\,3}'"), "nvcc splits at commas"
    namespaces = [line.rpartition("=")[2] for line in lines if "TK_LIBRARY" in line]
    assert namespaces == [
        *["transformer_kernels_sm90_fwd_128_wide"] * 2,
        *["transformer_kernels_sm90_fwd_128_again"] * 2,
    ]
    links = [line.split()[3:] for line in lines if ".so: link " in line]
    assert len({len(objects) for objects in links}) == 1
    assert not any("/cpu/" in path or "/linear/" in path or "delta" in path for path in links[0])
    for objects, folder in zip(links, ("out", "build/original"), strict=True):
        (unit,) = (path for path in objects if "/kernels-" in path)
        assert unit.startswith(f"{folder}/{kernels}-bfloat16-128-128")
    absent = sum("/absent-" in path for path in links[0])
    assert absent == sum(unit.source in KERNELS for unit in UNITS) - 1


def test_the_compiler_of_the_emulator_gets_the_tile_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = manifest(units_of(Emulation().units(TORCH, ROOT)), monkeypatch, tmp_path)
    assert any(line.endswith("'-DTK_SM90_FORWARD={2,128,3}'") for line in lines)


def test_advice_of_ptxas_is_found_by_library(tmp_path: Path) -> None:
    original = Original(UNITS, "build/original", str(tmp_path), Toolchain((), (), ()))
    advice = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions"
    report = tmp_path / f"csrc/cuda/sm90/kernels-bfloat16-128-128-{WIDE.name}.o.ptxas"
    report.parent.mkdir(parents=True)
    report.write_text(f"ptxas info    : 0 bytes gmem\n{advice}\n{advice}\n")
    assert libraries.advice(WIDE, original) == [advice]
    assert libraries.advice(AGAIN, original) == []


def test_tiles_replace_rows_of_units_that_exist() -> None:
    header = (ROOT / "csrc/cuda/common/tile_config.h").read_text()
    sources = {unit.variant: unit.source for unit in UNITS}
    names = [library.name for group, rows in TILES.items() for library in libraries_of(group, rows)]
    for group in TILES:
        assert sources[group.unit] == f"csrc/cuda/{group.kernels}/kernels.cu"
        assert f"#ifdef {group.macro}\n  return {group.macro};" in header
    assert len({*names}) == sum(map(len, TILES.values())) + 2 * len(TILES)


def test_cases_have_as_many_tokens_and_columns() -> None:
    for group in TILES:
        cases = cuda.cases_of(group, cuda.LENGTHS)
        assert {(case.B * case.M, case.H_q * case.D_v) for case in cases} == {(16384, 2048)}
        assert {(case.D, case.D_v) for case in cases} == {(group.D, group.D_v)}
        assert len({case.name for case in cases}) == 4


def results(change: str, *ratios: float | None, group: Group = GROUP) -> list[Result]:
    """A case each; None: it failed."""
    name = f"{group}-{change}"
    return [
        Result(group, name, f"case {n}", reason="o: error 3.0")
        if ratio is None
        else Result(group, name, f"case {n}", 600.0, 600.0 * ratio, Ratio(ratio, ratio, ratio))
        for n, ratio in enumerate(ratios)
    ]


MADE_UP: Tiles = {GROUP: {"fast": "{1}", "best": "{2}"}, OTHER: {"other": "{3}"}}


def advised(*found: list[Result]) -> list[str]:
    lines = list(conclusion(MADE_UP, [one for part in found for one in part]))
    names = [line.split()[0] for line in lines if "is faster in every case: {" in line]
    assert lines[-1].startswith("No tile is faster by more than 1%") == (not names)
    return names


def test_the_best_tile_of_a_group_that_is_faster_in_every_case_is_named() -> None:
    fast = results("fast", 1.2, 1.05, 1.2)
    assert advised(fast) == ["fast"]
    assert advised(fast, results("best", 1.06, 1.06, 1.06)) == ["best"]
    assert advised(results("best", 1.3, 1.0, 1.3), fast) == ["fast"]
    assert advised(fast, results("other", 1.03, group=OTHER)) == ["fast", "other"]
    for worst in (1.009, 0.97, None):
        assert advised(results("fast", 1.2, worst, 1.2)) == []


def test_a_gain_within_the_noise_of_the_group_is_not_named() -> None:
    fast = results("fast", 1.05, 1.05)
    assert advised(fast, results("again", 1.0, 0.94)) == []
    assert advised(fast, results("again", 1.0, 0.94, group=OTHER)) == ["fast"]
    first, *_ = conclusion(MADE_UP, [*fast, *results("again", 1.0, 0.94)])
    assert first == (
        "sm90-fwd-128: the present kernels differ from themselves by up to 6.0%; repeat with more "
        "--seconds"
    )


def test_lines_have_the_columns_of_the_headings() -> None:
    (measured,), (failed,) = results("fast", 1.0019), results("fast", None)
    assert measured.line() == (
        "| sm90-fwd-128-fast | case 0 | 600.0 | 601.1 | 1.002 | 1.002 to 1.002 |"
    )
    assert failed.line() == "| sm90-fwd-128-fast | case 0 |  |  | failed | o: error 3.0 |"


@pytest.mark.skipif(torch.cuda.is_available(), reason="messages without a CUDA device")
def test_the_program_says_what_it_lacks() -> None:
    for words, message in (
        (["cuda", "--only", "sm80-fwd-64-96-keys"], "tuning needs a CUDA device, and torch "),
        (["triton"], "tuning needs a GPU that Triton can run on: "),
        (["triton", "--seconds", "0"], "--seconds must be positive and finite, got 0.0"),
    ):
        command = [sys.executable, "-m", "benchmarks.tuning", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode > 0
        assert message in done.stderr
        assert "Traceback" not in done.stderr


@pytest.fixture
def emulated() -> Iterator[Original]:
    """The emulated kernels. Those compiled again run for seconds, so they are not optimised."""
    if (reason := emulator.unavailable_reason()) is not None:
        pytest.skip(reason)
    before = emulator.emulated_by()
    emulator.install()
    config = Emulation()
    units = units_of(config.units(find_torch(), ROOT))
    slow = [replace(unit, flags=(*unit.flags, "-O0")) for unit in units]
    folders = (emulator.folder(config), "build/tune_emulated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOPPER_SWITCH, "1")
        yield Original(slow, *folders, emulator.toolchain())
    emulator.emulate(before)


def small_cases(group: Group) -> list[Case]:
    """Those of the program and one with dropout, of two heads, which are both compared with
    float64."""
    masks = (("full", None, 0.0), ("causal", Mask.causal(), 0.0), ("dropout", None, 0.25))
    return [
        Case(
            name=name, H_q=2, H_kv=2, M=LENGTH, N=LENGTH, D=group.D, D_v=group.D_v,
            dtype=torch.bfloat16, mask=mask, mask_name=name, dropout_p=dropout_p,
        )
        for name, mask, dropout_p in masks
    ]  # fmt: skip


@pytest.mark.exhaustive
def test_every_tile_is_right_in_the_emulator(emulated: Original) -> None:
    """From the compilation to the last lines, but for the GPU."""
    group = Group("sm80", "fwd", 128, 128)
    too_large = {"too-large": "{128,512,8}"}  # 288 KiB
    tiles = {**TILES, group: {**TILES[group], **too_large}}
    for name, path in cuda.build(tiles, emulated).items():
        torch.ops.load_library(path)
        namespace = f"transformer_kernels_{name.replace('-', '_')}"
        getattr(torch.ops, namespace).set_chip(90)
    budget = Budget(0.0, fewest=2, most=2)
    device = torch.device("cpu")
    found = list(cuda.compare(tiles, small_cases, budget, PROVENANCE, device))
    results = [one for of_case, _ in found for one in of_case]
    failed = [one for one in results if one.ratio is None]
    assert {one.library for one in failed} == {f"{group}-too-large"}
    assert len(failed) == 3
    assert all("shared memory" in one.reason for one in failed)
    measured = [one for one in results if one.ratio is not None]
    assert [(one.group, one.library) for one in measured] == [
        (group, library.name)
        for group, rows in TILES.items()
        for _ in range(3)
        for library in libraries_of(group, rows)[1:]
    ]
    rows = [row for _, of_case in found for row in of_case]
    assert len(rows) == len(measured) + 3 * len(TILES)
    assert all(row.error < 0.02 for row in rows)
    assert {one.line().count("|") for one in results} == {7}
    for group, own in TILES.items():
        hopper = group.kernels == "sm90"
        folder = "sm90::" if hopper else ""
        backward = "backward_postprocess_kernel" if hopper else "dq_postprocess_kernel"
        kernel = "forward_kernel" if group.direction == "fwd" else backward
        for library in libraries_of(group, own)[2:]:
            launched = getattr(torch.ops, library.namespace).latest_launch()
            assert launched.startswith(f"({folder}{kernel}")


CPU = torch.device("cpu")
SMALL = Shape(B=1, H=1, S=37, D=16)


@pytest.mark.parametrize("kernel", triton.KERNELS)
@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_candidates_fit_the_chip(kernel: config.Kernel, chip: config.Chip) -> None:
    with target.override_chip(chip):
        tiles = triton.candidates(kernel, CPU, 2, 128)
    default = config.tile(kernel, chip, 2, 128)
    assert tiles[0] == default
    if kernel in config.SQUARE:
        assert all(tile.block_m == tile.block_n <= 64 for tile in tiles)
    assert len(set(tiles)) == len(tiles) > (2 if kernel in config.SQUARE else 20)
    for tile in tiles[1:]:
        assert config.shared_bytes(kernel, chip, tile, 2, 128) <= 1024 * chip.shared_kib


def needs_the_interpreter() -> None:
    if torch.cuda.is_available():
        pytest.skip("on a GPU the tuning itself runs: tests/gpu")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", triton.KERNELS)
def test_tiles_are_timed_and_sorted(kernel: config.Kernel) -> None:
    needs_the_interpreter()
    tiles = [Tile(64, 64, 4, 1), Tile(16, 16, 4, 1), Tile(32, 32, 4, 1)]
    results = list(triton.tune(kernel, torch.float32, SMALL, CPU, tiles=tiles, seconds=0.01))
    times = [one.median_ms or 0.0 for one in results]
    assert len(times) == 2  # the faster half
    assert 0.0 < times[0] <= times[1]
    assert {one.tile for one in results} < set(tiles)
    assert str(results[0]).startswith("(")


def test_a_wrong_tile_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_the_interpreter()
    from transformer_kernels.backends.triton import launch

    original = launch.bwd_dq

    def broken(*arguments: object) -> torch.Tensor:
        dq = original(*arguments)  # type: ignore[arg-type]
        default = config.tile("bwd_dq", CHIPS["sm90"], 4, 16)
        return dq if default != Tile(16, 16, 4, 1) else dq * 1.01

    monkeypatch.setattr(launch, "bwd_dq", broken)
    tiles = [Tile(16, 16, 4, 1), Tile(32, 32, 4, 1)]
    wrong, right = triton.tune("bwd_dq", torch.float32, SMALL, CPU, tiles=tiles, seconds=0.01)
    assert (wrong.tile, wrong.median_ms) == (tiles[0], None)
    assert wrong.reason.startswith("WRONG: error ")
    assert right.median_ms is not None


@pytest.mark.exhaustive
def test_compile_ahead_returns_the_errors_of_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_the_interpreter()
    from tests.support import triton_interpreter

    pool = partial(ProcessPoolExecutor, initializer=triton_interpreter.install)
    monkeypatch.setattr(triton, "ProcessPoolExecutor", pool)
    tiles = [Tile(16, 16, 4, 1), Tile(32, 32, 4, 1)]
    assert triton.compile_ahead("forward", torch.float32, SMALL, CPU, tiles) == []
    nowhere = torch.device("cuda", 99)
    assert len(triton.compile_ahead("forward", torch.float32, SMALL, nowhere, tiles)) > 0


def test_a_tile_that_cannot_compile_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_the_interpreter()
    from triton.runtime.errors import OutOfResources

    from transformer_kernels.backends.triton import launch

    original = launch.forward

    def limited(call: launch.Pass) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if config.tile("forward", CHIPS["sm90"], 4, 16) == Tile(128, 128, 4, 4):
            raise OutOfResources(300, 200, "shared memory")
        return original(call)

    monkeypatch.setattr(launch, "forward", limited)
    tiles = [Tile(128, 128, 4, 4), Tile(32, 32, 4, 1)]
    rejected, timed = triton.tune("forward", torch.float32, SMALL, CPU, tiles=tiles, seconds=0.01)
    assert (rejected.tile, rejected.median_ms) == (tiles[0], None)
    assert "shared memory" in str(rejected)
    assert timed.tile == tiles[1]
    assert timed.median_ms is not None
