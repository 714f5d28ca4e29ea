"""The command `demo`: measures fused attention on this machine and trains a small GPT-2."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="measure fused attention on this machine and train a small GPT-2 with it",
        description="Compares naive, torch SDPA and fused attention in speed, memory and accuracy, "
        "then trains a small GPT-2 with eager and with fused attention. Prints tables; writes CSV "
        "files, pictures and a text sample. Takes three and a half minutes on two CPU cores.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/demo"),
        metavar="DIR",
        help="output folder; files of an earlier demo are overwritten (default: %(default)s)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="toy sizes, done within seconds: a functional check, not a measurement",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..common.optional_deps import require
    from ..demo import FULL, QUICK, run_demo
    from .error_mapping import as_user_error
    from .errors import UserError

    try:
        require("rich", extra="train")
        require("matplotlib", extra="train")
        require("tokenizers", extra="train")
    except ImportError as error:
        raise UserError(f"the demo needs {error}") from None
    try:
        _check_writable(args.out)
    except OSError as error:
        raise UserError(f"--out {args.out} cannot be written: {error.strerror}") from None
    with as_user_error(OSError):  # a full disk
        run_demo(QUICK if args.quick else FULL, args.out)
    return 0


def _check_writable(folder: Path) -> None:
    """Creates the folder and a temporary file in it, to fail before minutes of work.

    Raises:
        OSError: the folder cannot be created or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / ".writable"
    probe.touch()
    probe.unlink()
