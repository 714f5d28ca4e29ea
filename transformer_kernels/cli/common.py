"""Errors of the user, and options that commands share."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_MEMORY = "can't allocate memory"
"""Part of the RuntimeError of torch's CPU allocator"""


class UserError(Exception):
    """An invalid request by the user; the text is one line with the reason."""


@contextmanager
def as_user_error(*kinds: type[Exception]) -> Iterator[None]:
    """Converts exceptions of these types into a one-line `UserError`.

    Wrap only calls that validate user input, and list only the types they raise for invalid input.
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise UserError(f"{error.filename}: {error.strerror}") from error
        raise UserError(" ".join(str(error).split())) from error


@contextmanager
def memory_as_user_error() -> Iterator[None]:
    """Converts failed allocations of Python and torch, on the CPU or a GPU, into a `UserError`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        on_gpu = type(error).__name__ == "OutOfMemoryError"  # torch's, not imported here
        if isinstance(error, RuntimeError) and not on_gpu and _NO_MEMORY not in str(error):
            raise
        raise UserError(
            "out of memory: try a smaller --batch or model, a larger --accumulate or --recompute"
        ) from error


def run_folder(kind: str) -> Path:
    """Default output folder of a training run."""
    return Path("runs", kind)


def check_text(name: str, text: str) -> None:
    """Raises UserError unless a text from the command line or standard input is UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{name} must be UTF-8 text, got {text[:60]!a}") from None


def add_number(parser: argparse.ArgumentParser, name: str, **settings: object) -> None:
    """Adds an option whose value is a whole number, unless `type` says otherwise."""
    parser.add_argument(name, **{"type": int, "metavar": "N", **settings})  # type: ignore[arg-type]
