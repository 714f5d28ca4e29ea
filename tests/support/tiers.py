"""Sampling of test cases: `make test` runs a sample, `make test-all` everything.

Tests outside the sample are marked `exhaustive`. The sampled cases of a table together cover every
option and every size in it. Each runs once per backend (or instruction set), in one dtype; dtypes
alternate from case to case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import fields
from typing import Any, TypeVar

import pytest
from _pytest.mark.structures import ParameterSet

from transformer_kernels.masks.constraints import Window
from transformer_kernels.masks.mask import Mask

C = TypeVar("C", bound=Any)
"""A case: a frozen dataclass with a name; its other fields are sizes and options."""

Ways = Iterable[tuple[Any, ...]]
"""Further arguments of a test: a backend or an instruction set, then one that alternates, such as a
dtype."""


def sampled(cases: Iterable[C], ways: Ways = ((),)) -> list[ParameterSet]:
    """Returns test parameters for all cases and ways; those outside the sample are `exhaustive`."""
    cases = list(cases)
    indices = {case.name: index for index, case in enumerate(sample(cases))}
    return _parameters([(case, indices.get(case.name)) for case in cases], ways)


def in_turns(items: Iterable[Any], ways: Ways) -> list[ParameterSet]:
    """Returns test parameters like `sampled`, with every item in the sample."""
    return _parameters([(item, index) for index, item in enumerate(items)], ways)


def _parameters(items: Iterable[tuple[Any, int | None]], ways: Ways) -> list[ParameterSet]:
    """Groups the ways by all but their last element. In the sample, an item with an index runs in
    one way per group, and an item without one does not run."""
    groups = defaultdict[tuple[Any, ...], list[tuple[Any, ...]]](list)
    for way in ways:
        groups[way[:-1]].append(way)
    return [
        pytest.param(
            item,
            *way,
            id="-".join(map(str, (item, *way))),
            marks=() if index is not None and index % len(group) == n else pytest.mark.exhaustive,
        )
        for item, index in items
        for group in groups.values()
        for n, way in enumerate(group)
    ]


def sample(cases: Iterable[C]) -> list[C]:
    """Returns few cases that together have every feature: a greedy set cover.

    The next case is the one with the most missing features; ties are broken by cost.
    """
    left = {case.name: (case, features(case)) for case in cases}
    missing = frozenset[Hashable]().union(*(found for _, found in left.values()))
    chosen = []
    while missing:
        name = max(left, key=lambda name: (len(left[name][1] & missing), -_cost(left[name][0])))
        case, found = left.pop(name)
        chosen.append(case)
        missing -= found
    return chosen


def features(case: Any) -> frozenset[Hashable]:
    """Returns the sizes and options of a case that differ from the default.

    Masks are distinguished by the kinds of their constraints, and windows by the signs of their
    sides.
    """
    return frozenset(_features(case))


def _features(case: Any) -> Iterator[Hashable]:
    for field in fields(case):
        value = getattr(case, field.name)
        if field.name == "name" or value == field.default:
            continue
        if field.name == "mask":
            mask = value if isinstance(value, Mask) else value(case)
            yield frozenset(map(_kind, mask.constraints))
        else:
            yield field.name, str(value)  # NaN equals itself as text


def _kind(constraint: object) -> Hashable:
    if isinstance(constraint, Window):
        sides = (constraint.left, constraint.right)
        return "window", constraint.align, *(None if x is None else x < 0 for x in sides)
    return type(constraint).__name__


def _cost(case: Any) -> int:
    """Number of query-key pairs; sizes that the case lacks count as 1."""
    return int(getattr(case, "M", 1) * getattr(case, "N", 1))
