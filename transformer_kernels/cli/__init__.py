"""Command line: `python -m transformer_kernels <command>`, or `transformer-kernels <command>`.

Each command is a module with a function `add_parser`, which registers a function `run`. Heavy
imports such as torch are inside `run`, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from ..version import __version__
from . import bench, classify, demo, evaluate, generate, info, lookup, tiles, train, translate
from .errors import UserError


class Command(Protocol):
    """Interface of a command module."""

    def add_parser(
        self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser], /
    ) -> None: ...


COMMANDS: tuple[Command, ...] = (
    *(info, demo, bench),
    *(train, evaluate, generate, classify, translate, lookup),
    tiles,
)


_BROKEN_PIPE = 141
"""Exit status 128 + SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments after the program name; `sys.argv[1:]` if None.

    Returns:
        exit status: 0 on success, 2 for a user error, 141 (as other programs) for a closed output
        pipe; commands may return others.
    """
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. Python would fail again when it flushes stdout
        # at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="transformer-kernels",
        description="Fused attention kernels for PyTorch: inspect the installation, run a demo, "
        "train and use the reference models.",
        epilog="Help for one command: transformer-kernels COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser
