"""Converts library errors about user input into `UserError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import UserError

_NO_MEMORY = "can't allocate memory"
"""Part of the RuntimeError of torch's CPU allocator"""


@contextmanager
def as_user_error(*kinds: type[Exception]) -> Iterator[None]:
    """Converts exceptions of these types into a one-line `UserError`.

    Wrap only calls that validate user input, and list only the types they raise for invalid input.
    """
    try:
        yield
    except kinds as error:
        raise UserError(_one_line(error)) from error


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


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
