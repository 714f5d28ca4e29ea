"""Options of the command line from the fields of config dataclasses.

The type, choices and default of an option are those of its field, and its help is the docstring
below the field.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

_SEPARATOR = "/"
"""Between the names of nested fields in the destination of an option"""

_NAMES = {"peak": ("lr", "peak")}
"""Names of an option, where the first is not that of its field"""


def add_options(
    parser: argparse._ActionsContainer,
    config: Any,
    *,
    without: frozenset[str] = frozenset(),
) -> None:
    """Adds an option for each field of a config and of the configs in its fields.

    An option that is not given leaves nothing in the parsed arguments.

    Args:
        parser: receives the options.
        config: dataclass with the values shown as defaults.
        without: names of fields that have no option.
    """
    for path, hint, value, meaning in _leaves(config, ""):
        if path.rpartition(_SEPARATOR)[2] in without:
            continue
        help_ = f"{meaning} (default: {_shown(value)})".strip().replace("%", "%%")
        parser.add_argument(
            *option_names(path),
            dest=path,
            default=argparse.SUPPRESS,
            help=help_,
            **_type_settings(hint),
        )


def given_options(args: argparse.Namespace, config: Any) -> dict[str, Any]:
    """The options that were given, by the path of their field."""
    given = vars(args)
    return {path: given[path] for path, *_ in _leaves(config, "") if path in given}


def option_names(path: str) -> list[str]:
    name = path.rpartition(_SEPARATOR)[2]
    return [f"--{one.replace('_', '-')}" for one in _NAMES.get(name, (name,))]


def with_options(config: Any, given: Mapping[str, Any]) -> Any:
    """The config with the fields at these paths replaced.

    Raises:
        ValueError: a value is out of range.
    """
    inner: dict[str, dict[str, Any]] = {}
    changes: dict[str, Any] = {}
    for path, value in given.items():
        name, _, rest = path.partition(_SEPARATOR)
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            changes[name] = tuple(value) if isinstance(value, list) else value
    for name, below in inner.items():
        changes[name] = with_options(getattr(config, name), below)
    return replace(config, **changes)


def _leaves(config: Any, prefix: str) -> Iterator[tuple[str, Any, Any, str]]:
    """Path, type, value and docstring of each field that is no dataclass."""
    hints, meanings = get_type_hints(type(config)), _docstrings(type(config))
    for field in fields(config):
        path, value = prefix + field.name, getattr(config, field.name)
        if is_dataclass(value):
            yield from _leaves(value, path + _SEPARATOR)
        else:
            yield path, hints[field.name], value, meanings.get(field.name, "")


def _docstrings(cls: type) -> dict[str, str]:
    """The string below each field in the source of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split()).rstrip(".")
        for field, text in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _type_settings(hint: Any) -> dict[str, Any]:
    """Arguments of `add_argument` for a type: a number, a string, choices, a flag or a tuple."""
    if NoneType in get_args(hint):
        (hint,) = (one for one in get_args(hint) if one is not NoneType)
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is tuple:
        return {"nargs": len(get_args(hint)), "type": get_args(hint)[0], "metavar": "N"}
    return {"type": hint, "metavar": "NAME" if hint is str else "N"}


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
