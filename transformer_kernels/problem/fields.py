"""The table of fields: one row for each option of a call, in the order of the operators' arguments.

`ScoreOptions`, `ResolvedMask` and `Layout` declare the rows. The schemas of the operators, their
fake implementations, and the packing and unpacking of a problem derive from the table.
csrc/common/fields.h is the same table for C++; tests/problem/test_fields.py compares them.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """Layouts that have the option, separated by spaces."""
    default: Any

    def dimension(self, symbol: str) -> tuple[int, bool] | None:
        """Returns the index of dimension B or H_q, and True if its size may be 1 instead.

        None if the option has no such dimension. S, the number of sequences, counts as B.
        """
        for index, size in enumerate(self.shape.strip("()").split(", ")):
            optional, _, name = size.rpartition("|")
            if symbol == ("B" if name == "S" else name):
                return index, optional == "1"
        return None


def _fields(group: Any) -> Iterator[Field]:
    types, annotated = get_type_hints(group), get_type_hints(group, include_extras=True)
    for name in group._fields:
        shape, layouts = getattr(annotated[name], "__metadata__", ("", "dense varlen cache"))
        default = group._field_defaults[name]
        yield Field(name, _KINDS[types[name]], shape, layouts, default)


FIELDS = tuple(field for group in GROUPS for field in _fields(group))
SCHEMA = ", ".join(f"{field.kind} {field.name}" for field in FIELDS)
"""The fields in the schema of an operator."""
