"""Command line: `python -m transformer_kernels <command>`, or `transformer-kernels <command>`.

Each module has a function `add_parser`, which registers one command or more, each with its function
`run`. Heavy imports such as torch are inside `run`, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from ..version import __version__
from . import bench, demo, inference, info, train
from .common import UserError


class Command(Protocol):
    """Interface of a command module."""

    def add_parser(
        self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser], /
    ) -> None: ...


COMMANDS: tuple[Command, ...] = (info, demo, bench, train, inference)

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
    words = sys.argv[1:] if argv is None else argv
    args = _parser(words).parse_args(words)
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


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
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
    if list(words[:1]) == ["train"]:
        # Its options are the fields of the configs, which import the models.
        train.add_models(subparsers.choices["train"])
    return parser
