"""Calls of public functions, described by plain values: what the fuzzer draws and shrinks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, repr=False)
class PlainValues:
    """Base class of dataclasses whose repr is their source.

    Fields are numbers, strings, tuples and other `PlainValues`.
    """

    def __repr__(self) -> str:
        """Python source of the object, without the fields that have their defaults."""
        given = ((field, getattr(self, field.name)) for field in fields(self))
        text = ", ".join(f"{f.name}={value!r}" for f, value in given if value != f.default)
        return f"{type(self).__name__}({text})"


class Call(PlainValues, ABC):
    """A call, whose repr reproduces it."""

    @abstractmethod
    def check(self) -> None:
        """Makes the call. Raises AssertionError if the result, or the error, is wrong."""
