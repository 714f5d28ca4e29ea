"""The command `tiles`."""

from __future__ import annotations

import argparse

from transformer_kernels.backends.triton.config import CHIPS, WIDTHS


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "tiles",
        help="compile every Triton tile for every GPU, without one: registers, memory, spills",
    )
    parser.add_argument(
        "--chip", choices=CHIPS, action="append", help="only this one; can be repeated"
    )
    parser.add_argument("--width", type=int, choices=WIDTHS, action="append", help="of D and D_v")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from transformer_kernels.backends.triton import compile_report as offline
    from transformer_kernels.backends.triton import interpreter, target
    from transformer_kernels.cli.errors import UserError

    if not target.INSTALLED:
        raise UserError("tiles needs the package triton: pip install triton")
    if interpreter.is_on():
        raise UserError("Triton's interpreter has nothing to compile: unset TRITON_INTERPRET")
    chips, widths = tuple(args.chip or CHIPS), tuple(args.width or WIDTHS)
    row = "{:6} {:16} {:9} {:>5}  {:9} {:>5} {:>6} {:>7} {:>9} {:>6} {:>8} {:>7}"
    heading = "chip kernel dtype D tile warps stages KiB registers spills in-loops seconds"
    print(row.format(*heading.split()))
    for c in offline.compile_tiles(chips, widths=widths):
        print(
            row.format(
                c.chip, c.kernel, c.dtype, c.columns, c.tile, c.warps, c.stages,
                f"{c.shared_kib:.0f}", c.registers, c.spills, c.spills_in_loops,
                f"{c.seconds:.1f}",
            ),
            flush=True,
        )  # fmt: skip
    return 0
