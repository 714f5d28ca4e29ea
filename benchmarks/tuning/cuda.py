"""Compares tiles of the CUDA kernels with the present ones, in turns.

Every tile of TILES is a library of its own in build/tune, with its own operator namespace. All of
them run in one process: each round of a case calls the present kernels, a second library of the
same kernels, and every tile of the group. Each is first compared with float64. The last lines name
the tiles that are faster in every case (docs/hopper.md, section 8).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from setuptools.errors import CompileError

from benchmarks.tuning import libraries
from benchmarks.tuning.libraries import Library
from building.cuda_toolkit import NoCudaError
from building.extension import ROOT
from transformer_kernels.backends import CudaBackend
from transformer_kernels.backends.native import cuda_support
from transformer_kernels.backends.native.cuda import HOPPER_SWITCH
from transformer_kernels.bench import (
    Attend,
    Budget,
    Case,
    Direction,
    Interleaver,
    Provenance,
    Ratio,
    Row,
    Variant,
    clock_for,
    write_rows,
)
from transformer_kernels.bench.trial import DeviceLostError, try_out
from transformer_kernels.bench.variants import ours
from transformer_kernels.common.namespace import NAMESPACE
from transformer_kernels.masks.mask import Mask

LENGTHS = (4096, 16384)
TOKENS, COLUMNS = 16384, 2048
"""B * S and H * D_v of every case."""
FEWEST, MOST = 20, 400
"""Bounds on the rounds of a case."""
MARGIN = 0.01
"""A tile must be faster by more than this in every case."""
HEADINGS = ("tile", "case", "TFLOP/s: present", "tile", "ratio", "20% to 80%")


class Group(NamedTuple):
    """Kernels of one pass and width in bfloat16, whose tiles are timed together."""

    kernels: Literal["sm90", "sm80"]
    direction: Direction
    """the pass, "fwd" or "bwd", that the tiles concern"""
    D: int
    """width of q and k"""
    D_v: int

    def __str__(self) -> str:
        widths = dict.fromkeys((f"{self.D}", f"{self.D_v}"))
        return "-".join([self.kernels, self.direction, *widths])

    @property
    def unit(self) -> str:
        """Name of the unit of kernels that is recompiled (building/cuda.py)."""
        widths = (self.D, self.D_v) if self.kernels == "sm90" else (max(self.D, self.D_v),)
        return "-".join(["bfloat16", *map(str, widths)])

    @property
    def macro(self) -> str:
        """Macro of tile_config.h that replaces the row."""
        return f"TK_{self.kernels.upper()}_{'FORWARD' if self.direction == 'fwd' else 'BACKWARD'}"


Tiles = Mapping[Group, Mapping[str, str]]

TILES: Tiles = {
    Group("sm80", "bwd", 64, 64): {"64-queries": "{64,128,8,2,4,2,2}"},  # 96 KiB
    Group("sm80", "fwd", 128, 128): {
        "128-keys": "{128,128,8}",
        "8-warps": "{128,64,8}",
        "64-queries": "{64,64,4}",
    },
    Group("sm80", "fwd", 64, 64): {"64-keys": "{128,64,4}", "96-keys": "{128,96,4}"},
}
"""Rows of tile_config.h to try, by what distinguishes them from the present one."""


class Result(NamedTuple):
    """Speed of a library in one case, or the reason why it was not measured."""

    group: Group
    library: str
    case: str
    present_tflops: float = 0.0
    tflops: float = 0.0
    ratio: Ratio | None = None
    """time of the present kernels over that of the library, round by round; None if it failed"""
    reason: str = ""

    def line(self) -> str:
        """A line of the table, in Markdown."""
        if self.ratio is None:
            return _line([self.library, self.case, "", "", "failed", self.reason])
        median, p20, p80 = self.ratio.median, self.ratio.p20, self.ratio.p80
        speeds = (f"{self.present_tflops:.1f}", f"{self.tflops:.1f}")
        return _line([self.library, self.case, *speeds, f"{median:.3f}", f"{p20:.3f} to {p80:.3f}"])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def libraries_of(group: Group, rows: Mapping[str, str]) -> list[Library]:
    """The libraries to compare in the cases of a group: the present kernels, the same again, whose
    ratio to the first would be 1 if the measurement were exact, and other tiles.
    """
    present = [Library(f"{group}-{name}", group.unit) for name in ("present", "again")]
    own = [
        Library(f"{group}-{change}", group.unit, f"{group.macro}={row}")
        for change, row in rows.items()
    ]
    return [*present, *own]


def build(tiles: Tiles, original: libraries.Original) -> dict[str, Path]:
    """Builds the libraries of all groups, and prints the advice of ptxas on their kernels.

    Returns:
        Paths of the libraries by name.

    Raises:
        CompileError: a library does not compile.
    """
    paths = libraries.build(every(tiles), original)
    for library in every(tiles):
        for text in libraries.advice(library, original):
            print(f"{library.name}: {text}", flush=True)
    return paths


def every(tiles: Tiles) -> list[Library]:
    """The libraries of all groups."""
    return [library for group, rows in tiles.items() for library in libraries_of(group, rows)]


def use_library(device: torch.device, namespace: str) -> None:
    """Runs the operators of a library that is loaded into this process, from now on."""
    cuda_support.libraries[device.type].use(namespace)


def runs_kernels(library: Library, group: Group) -> bool:
    """Makes a library run the kernels of a group, before its first call. False if it cannot.

    Each library reads the environment variable HOPPER_SWITCH once.
    """
    os.environ[HOPPER_SWITCH] = "1" if group.kernels == "sm90" else "0"
    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    runs_hopper = bool(getattr(torch.ops, library.namespace).runs_hopper(device))
    return runs_hopper == (group.kernels == "sm90")


def cases_of(group: Group, lengths: Sequence[int]) -> list[Case]:
    """Full and causal at each length."""
    H = COLUMNS // group.D_v
    masks = {"full": None, "causal": Mask.causal()}
    return [
        Case(
            name=f"{name}, S = {S}", B=TOKENS // S, H_q=H, H_kv=H, M=S, N=S, D=group.D,
            D_v=group.D_v, dtype=torch.bfloat16, mask=mask, mask_name=name,
        )
        for S in lengths
        for name, mask in masks.items()
    ]  # fmt: skip


def compare(
    tiles: Tiles,
    cases: Callable[[Group], Sequence[Case]],
    budget: Budget,
    provenance: Provenance,
    device: torch.device,
) -> Iterator[tuple[list[Result], list[Row]]]:
    """Compares all tiles, whose libraries are loaded; yields results and rows of one case each.

    Args:
        tiles: rows by group.
        cases: maps a group to its cases, on the CPU.
        budget: rounds of each case.
        provenance: shared columns of the rows.
        device: a CUDA device, or the CPU with emulated kernels.
    """
    for group, rows in tiles.items():
        compared = libraries_of(group, rows)
        if not all(runs_kernels(library, group) for library in compared):
            reason = "the GPU is not a Hopper GPU, or its kernels are not built"
            yield [Result(group, library.name, "all", reason=reason) for library in compared], []
            continue
        for case in cases(group):
            yield _compare_case(group, case.to(device), compared, budget, provenance)


def _compare_case(
    group: Group, case: Case, compared: Sequence[Library], budget: Budget, provenance: Provenance
) -> tuple[list[Result], list[Row]]:
    trial = try_out(case, [_variant(library) for library in compared])
    results = [Result(group, name, case.name, reason=why) for name, why in trial.broken.items()]
    present = compared[0].name
    if present in trial.broken:
        return results, []
    contenders = trial.checked.contenders(group.direction)
    timer = Interleaver({x.variant: x.prepare for x in contenders}, clock=clock_for(case.device))
    timings = timer.run(budget)
    rows = {x.variant: x.row(provenance, "tune", timings[x.variant], None) for x in contenders}
    for name, ratio in timer.ratios(present).items():
        if name != present:
            speeds = rows[present].tflops, rows[name].tflops
            results.append(Result(group, name, case.name, *speeds, ratio))
    return results, list(rows.values())


def _variant(library: Library) -> Variant:
    """The library as a variant of the benchmarks."""

    def attend_for(case: Case) -> Attend:
        attend = ours("cuda")(case)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            # Also for the backward pass: it runs before the next forward pass of any library.
            use_library(q.device, library.namespace)
            return attend(q, k, v)

        return call

    return Variant(library.name, library.name, attend_for, devices=("cpu", "cuda"), is_peer=False)


def conclusion(tiles: Tiles, results: Sequence[Result]) -> Iterator[str]:
    """Yields the noise of each group, and its best tile if that is faster than MARGIN and the noise
    in every case."""
    advised = False
    for group in dict.fromkeys(result.group for result in results):
        ratios: dict[str, list[float]] = {}
        for result in results:
            if result.group == group:
                median = 0.0 if result.ratio is None else result.ratio.median
                ratios.setdefault(result.library.removeprefix(f"{group}-"), []).append(median)
        again = ratios.pop("again", [])
        noise = max((abs(ratio - 1.0) for ratio in again if ratio), default=0.0)
        repeat = "; repeat with more --seconds" if noise > MARGIN else ""
        yield f"{group}: the present kernels differ from themselves by up to {noise:.1%}{repeat}"
        worst = {change: min(of_change) for change, of_change in ratios.items()}
        best = max(worst, key=worst.__getitem__, default=None)
        if best is not None and worst[best] > 1.0 + max(MARGIN, noise):
            advised = True
            yield f"  {best} is faster in every case: {tiles[group][best]} in tile_config.h"
    if not advised:
        yield f"No tile is faster by more than {MARGIN:.0%} in every case."


def add_options(parser: argparse.ArgumentParser) -> None:
    names = [f"{group}-{change}" for group, rows in TILES.items() for change in rows]
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", default=names, help="default: all"
    )
    parser.add_argument("--S", nargs="+", type=int, default=LENGTHS, help="lengths of sequences")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each case (%(default)s)")
    parser.add_argument("--build", action="store_true", help="build the libraries; needs no GPU")
    parser.add_argument("--built", action="store_true", help="measure libraries that are built")
    out = ROOT / "build" / "benchmarks"
    parser.add_argument("--out", type=Path, default=out, help="folder of tune.csv")


def run(args: argparse.Namespace) -> None:
    tiles = {
        group: chosen
        for group, rows in TILES.items()
        if (chosen := {name: row for name, row in rows.items() if f"{group}-{name}" in args.only})
    }
    try:
        if args.build:
            print(*build(tiles, libraries.extension()).values(), sep="\n")
        else:
            _measure(tiles, args)
    except (CompileError, NoCudaError, DeviceLostError) as error:
        sys.exit(str(error))


def _measure(tiles: Tiles, args: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        sys.exit(f"tuning needs a CUDA device, and torch {torch.__version__} finds none")
    if (reason := CudaBackend().unavailable_reason()) is not None:
        sys.exit(reason)
    device = torch.device("cuda")
    provenance = Provenance.now().on(device)
    budget = Budget(args.seconds, FEWEST, MOST)
    args.out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    rows: list[Row] = []
    if not args.built:
        build(tiles, libraries.extension())
    for library in every(tiles):
        torch.ops.load_library(library.path(libraries.OUTPUT))
    print(f"{provenance.device}, torch {provenance.torch}, commit {provenance.commit}\n")
    print(_line(HEADINGS), _line(["---", "---", *["---:"] * 4]), sep="\n", flush=True)
    try:
        found = compare(tiles, lambda one: cases_of(one, args.S), budget, provenance, device)
        for of_case, new_rows in found:
            print(*(result.line() for result in of_case), sep="\n", flush=True)
            results += of_case
            rows += new_rows
            write_rows(args.out / "tune.csv", rows)
    finally:
        use_library(device, NAMESPACE)
    print("", *conclusion(tiles, results), "", f"rows: {args.out / 'tune.csv'}", sep="\n")
