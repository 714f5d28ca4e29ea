"""The command line: `python -m transformer_kernels <command>`, or `transformer-kernels <command>`.

Each command is a module with `add_parser`, which sets `run`; heavy imports stand inside `run`.
"""

from __future__ import annotations

import argparse
import os
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


_BROKEN_PIPE = 141
"""128 and the number of the signal SIGPIPE"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 2 where the user has to change something, or
    141, as of other programs, where nobody reads the output to its end.

    Args:
        argv: the arguments after the program's name; `sys.argv[1:]` if None.
    """
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read the output has gone, as `head` does; Python would try to write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
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
