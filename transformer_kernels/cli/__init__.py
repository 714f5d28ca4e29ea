"""The command line: `python -m transformer_kernels <command>`, or `transformer-kernels <command>`.

Each command is a module with `add_parser`, which sets `run`; heavy imports stand inside `run`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Protocol

from transformer_kernels.cli import (
    classify,
    demo,
    generate,
    info,
    lookup,
    tiles,
    train,
    translate,
    tune,
)
from transformer_kernels.cli.errors import UserError
from transformer_kernels.version import __version__


class Command(Protocol):
    """What a module of this package offers."""

    def add_parser(
        self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser], /
    ) -> None: ...


COMMANDS: tuple[Command, ...] = (
    *(info, demo),
    *(train, generate, classify, translate, lookup),
    *(tiles, tune),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, or 2 where the user has to change something.

    Args:
        argv: the arguments after the program's name; `sys.argv[1:]` if None.
    """
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="transformer-kernels", description="Fused attention kernels for PyTorch."
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser
