"""Two tiers of tests: `make test` runs a sample, `make test-all` everything.

Tests outside of the sample are marked `exhaustive`. Tables of cases are sampled here: the chosen
cases have together every option and every size of their table. Each of them runs once for each
backend (or instruction set), in one dtype; dtypes take turns.
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
"""A case: a frozen dataclass with a name, whose other fields are sizes and options"""

Ways = Iterable[tuple[Any, ...]]
"""Further arguments of a test: a backend or an instruction set, and last what takes turns, such as
a dtype"""


def sampled(cases: Iterable[C], ways: Ways = ((),)) -> list[ParameterSet]:
    """Parameters of a test: every case in every way, all but a sample marked `exhaustive`."""
    cases = list(cases)
    turns = {case.name: turn for turn, case in enumerate(sample(cases))}
    return _parameters([(case, turns.get(case.name)) for case in cases], ways)


def in_turns(items: Iterable[Any], ways: Ways) -> list[ParameterSet]:
    """Parameters as by `sampled`, with every item in the sample."""
    return _parameters([(item, turn) for turn, item in enumerate(items)], ways)


def _parameters(items: Iterable[tuple[Any, int | None]], ways: Ways) -> list[ParameterSet]:
    """Ways that differ in their last part form a group. Of each group, an item with a turn has one
    way in the sample, and an item without one has none."""
    alike = defaultdict[tuple[Any, ...], list[tuple[Any, ...]]](list)
    for way in ways:
        alike[way[:-1]].append(way)
    return [
        pytest.param(
            item,
            *way,
            id="-".join(map(str, (item, *way))),
            marks=() if turn is not None and turn % len(group) == n else pytest.mark.exhaustive,
        )
        for item, turn in items
        for group in alike.values()
        for n, way in enumerate(group)
    ]


def sample(cases: Iterable[C]) -> list[C]:
    """Few cases that have together every feature of all: the next is always the one with most that
    are still missing, the cheaper one of two."""
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
    """Sizes and options of a case: the fields that have other values than by default. Masks are
    told apart by the kinds of their constraints, and windows by their sides."""
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
    """Pairs of queries and keys, as far as the case has them as sizes."""
    return int(getattr(case, "M", 1) * getattr(case, "N", 1))
