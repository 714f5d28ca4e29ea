"""The table of fields: one row for each option of a call, in the order of the operators' arguments.

`ScoreOptions`, `ResolvedMask` and `Layout` declare the rows. The schemas of the operators, their
fake implementations, and the packing and unpacking of a problem derive from the table.
csrc/common/fields.h is the same table for C++; tests/contract/test_fields.py compares them.
linear/family.py makes the tables of linear attention in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, get_type_hints

from torch import Tensor

from ..masks.resolved import ResolvedMask
from ..scores.options import ScoreOptions
from .layout import Layout

GROUPS = (ScoreOptions, ResolvedMask, Layout)

_KINDS = {
    float: "float",
    float | None: "float?",
    int: "SymInt",
    bool: "bool",
    str: "int",  # a name, by its number
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
}


class Field(NamedTuple):
    """One option of a call."""

    name: str
    kind: str
    """Type in the schema of an operator."""
    shape: str
    """Shape of a tensor, "" for a number. "1|B" is a dimension that broadcasts to B."""
    layouts: str
    """Layouts, or operators of linear attention, that have the option, separated by spaces."""
    default: Any

    def dimension(self, symbol: str) -> tuple[int, bool] | None:
        """Returns the index of dimension B or H_q, and True if its size may be 1 instead.

        None if the option has no such dimension. S, the number of sequences, counts as B, and so do
        `entries`, those of q's batch. H_kv counts as H_q.
        """
        for index, size in enumerate(self.shape.strip("()").split(", ")):
            optional, _, name = size.rpartition("|")
            if symbol == {"S": "B", "entries": "B", "H_kv": "H_q"}.get(name, name):
                return index, optional == "1"
        return None


def _fields(group: Any) -> Iterator[Field]:
    types, annotated = get_type_hints(group), get_type_hints(group, include_extras=True)
    for name in group._fields:
        shape, layouts = getattr(annotated[name], "__metadata__", ("", "dense varlen cache"))
        default = group._field_defaults.get(name)
        yield Field(name, _KINDS[types[name]], shape, layouts, default)


def table(*groups: Any) -> tuple[Field, ...]:
    """Returns the rows that named tuples declare."""
    return tuple(field for group in groups for field in _fields(group))


def schema_of(fields: Iterable[Field]) -> str:
    """Returns the fields in the schema of an operator."""
    return ", ".join(f"{field.kind} {field.name}" for field in fields)


def split(values: Sequence[Any], *groups: Any) -> list[Any]:
    """Returns named tuples of these types, which take the values in order."""
    *first, last = groups
    rest = iter(values)
    parts = [group._make(islice(rest, len(group._fields))) for group in first]
    parts.append(last._make(rest))
    return parts


FIELDS = table(*GROUPS)
SCHEMA = schema_of(FIELDS)
