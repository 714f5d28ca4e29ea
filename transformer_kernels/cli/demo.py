"""The command `demo`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "demo", help="what fused attention gains here: tables, pictures, a small trained GPT-2"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/demo"),
        metavar="DIR",
        help="where tables and pictures go; those of an earlier demo are replaced (%(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="toy sizes, in seconds: shows that it runs, not speed"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from transformer_kernels.cli.errors import UserError
    from transformer_kernels.demo import FULL, QUICK, run_demo
    from transformer_kernels.optional_deps import require

    try:
        require("rich", extra="train")
        require("matplotlib", extra="train")
        require("tokenizers", extra="train")
    except ImportError as error:
        raise UserError(f"the demo needs {error}") from None
    try:
        _make_writable(args.out)
    except OSError as error:
        raise UserError(f"--out {args.out} cannot be written: {error.strerror}") from None
    run_demo(QUICK if args.quick else FULL, args.out)
    return 0


def _make_writable(folder: Path) -> None:
    """Makes the folder, and a file in it for a moment: minutes of work should not end in an error.

    OSError where that fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / ".writable"
    probe.touch()
    probe.unlink()
