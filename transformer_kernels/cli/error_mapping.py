"""Converts library errors about user input into `UserError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformer_kernels.cli.errors import UserError


@contextmanager
def as_user_error(*kinds: type[Exception]) -> Iterator[None]:
    """Converts exceptions of these types into a one-line `UserError`.

    Wrap only calls that validate user input, and list only the types they raise for invalid input.
    """
    try:
        yield
    except kinds as error:
        raise UserError(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
