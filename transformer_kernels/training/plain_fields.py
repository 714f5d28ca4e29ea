"""Frozen dataclasses from plain values of a file, checked against their annotations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ..common.argument_checks import shown

Made = TypeVar("Made")

ADDED = {"added": True}
_INT64 = range(-(2**63), 2**63)


def from_fields(cls: Callable[..., Made], values: Any, name: str, **made: Any) -> Made:
    """Makes a dataclass from a dict of its fields; inverse of `dataclasses.asdict`.

    A field that is added later needs `metadata=ADDED` and a default: older files lack it.

    Args:
        cls: class of the result.
        values: the dict.
        name: name of the dict, for errors.
        made: fields that are not in the dict.

    Raises:
        ValueError: a field is unknown, absent, of another type or out of range.
    """
    if type(values) is not dict:
        raise ValueError(f"{name} must be a dict, got {shown(values)}")
    hints = get_type_hints(cls)
    given = {}
    for field in fields(cls):  # type: ignore[arg-type]
        if field.name in made:
            continue
        if field.name in values:
            given[field.name] = _checked(
                values[field.name], hints[field.name], f"{name}.{field.name}"
            )
        elif not field.metadata.get("added"):
            raise ValueError(f"{name} lacks {field.name!r}")
    if unknown := values.keys() - given.keys() - made.keys():
        raise ValueError(f"{name} has unknown fields: {', '.join(sorted(map(shown, unknown)))}")
    return cls(**given, **made)


def _checked(value: Any, hint: Any, name: str) -> Any:
    """`value`, if it is of the annotated type: a number, a string, a tuple or a dataclass."""
    if get_origin(hint) is UnionType:  # a type, or None
        if value is None:
            return None
        (hint,) = (one for one in get_args(hint) if one is not NoneType)
    if is_dataclass(hint):
        return from_fields(hint, value, name)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        hints = get_args(hint)
        if type(value) not in (list, tuple) or len(value) != len(hints):
            raise ValueError(f"{name} must have {len(hints)} numbers, got {shown(value)}")
        return tuple(_checked(each, one, name) for each, one in zip(value, hints, strict=True))
    if get_origin(hint) is Literal:
        hint = str  # the class checks its choices
    expected = (int, float) if hint is float else (hint,)
    if type(value) not in expected or (type(value) is int and value not in _INT64):
        raise ValueError(f"{name} must be of type {hint.__name__}, got {shown(value)}")
    return value


def is_text(value: Any) -> bool:
    """True for a string that can be printed and has no null character."""
    try:
        return type(value) is str and b"\0" not in value.encode()
    except UnicodeEncodeError:  # a surrogate
        return False
