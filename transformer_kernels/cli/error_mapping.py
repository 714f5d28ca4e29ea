"""From the library's errors about what the user gave to the command line's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformer_kernels.cli.errors import UserError


@contextmanager
def as_user_error(*kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds become a UserError, in one line.

    Put it around a call that checks what the user gave, and name only the kinds it is known to
    raise for that.
    """
    try:
        yield
    except kinds as error:
        raise UserError(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
