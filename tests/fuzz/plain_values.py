"""Dataclasses of plain values, whose repr is their source."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, repr=False)
class PlainValues:
    """Base class. Fields are numbers, strings, tuples and other `PlainValues`."""

    def __repr__(self) -> str:
        """Python source of the object, without the fields that have their defaults."""
        given = ((field, getattr(self, field.name)) for field in fields(self))
        text = ", ".join(f"{f.name}={value!r}" for f, value in given if value != f.default)
        return f"{type(self).__name__}({text})"
