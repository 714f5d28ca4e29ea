"""The commands `info` and `tiles`: the installation, and the resources of every Triton tile."""

from __future__ import annotations

import argparse
from itertools import chain

from ..backends.triton.config import CHIPS, WIDTHS
from .common import UserError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    info = subparsers.add_parser(
        "info",
        help="show versions, devices and available kernels, and how to get the missing ones",
    )
    info.set_defaults(run=_info)
    tiles = subparsers.add_parser(
        "tiles",
        help="compile every Triton tile (no GPU needed); report registers, shared memory, spills",
        description="Compiles every configured tile of the Triton kernels for each GPU "
        "architecture, without a GPU. Prints one row per tile: shared memory (KiB), registers per "
        "thread, spills, spills inside loops, and compile time.",
    )
    # fmt: off
    tiles.add_argument("--chip", choices=CHIPS, action="append",
                       help="GPU architecture; can be repeated (default: all)")
    tiles.add_argument("--width", type=int, choices=WIDTHS, action="append",
                       help="head dimension, D and D_v; can be repeated (default: all)")
    # fmt: on
    tiles.set_defaults(run=_tiles)


def _info(args: argparse.Namespace) -> int:
    from ..info import info

    print(info())
    return 0


def _tiles(args: argparse.Namespace) -> int:
    from ..backends.triton import compile_report, target
    from ..linear.delta.triton.report import DELTA
    from ..linear.triton.report import LINEAR

    if not target.INSTALLED:
        raise UserError("the command tiles needs the package triton: pip install triton")
    if target.INTERPRETED:
        raise UserError("Triton's interpreter is on: unset TRITON_INTERPRET to compile")
    chips, widths = tuple(args.chip or CHIPS), tuple(args.width or WIDTHS)
    row = "{:6} {:31} {:9} {:>5}  {:9} {:>5} {:>6} {:>7} {:>9} {:>6} {:>8} {:>7}"
    heading = "chip kernel dtype D tile warps stages KiB registers spills in-loops seconds"
    print(row.format(*heading.split()))
    suites = (compile_report.ATTENTION, LINEAR, DELTA)
    for c in chain(*(compile_report.compile_tiles(s, chips, widths=widths) for s in suites)):
        print(
            row.format(
                c.chip, c.kernel, c.dtype, c.columns, c.tile, c.warps, c.stages,
                f"{c.shared_kib:.0f}", c.registers, c.spills, c.spills_in_loops,
                f"{c.seconds:.1f}",
            ),
            flush=True,
        )  # fmt: skip
    return 0
