"""The quick tier: what `make test` runs.

A test function is in it if it is marked `quick`, or if its recorded cost is small (budget.py); a
new one is not. Items marked `exhaustive` never are.

A test with parameters runs in the quick tier with few of its parameter sets, which together have
every *aspect*: each value of each parameter, and for a case in a table each option and kind of mask
with each backend or instruction set. A test that runs a table with every backend also has each
value of each field of the table, such as a size. The sets left out run in `make test-rest`. The
items keep their names in both tiers, so that any of them runs alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from tests.support.budget import Costs, function_of
from tests.support.case import AnyCase
from tests.support.masks import Constraint, Window, each_of

RUNNERS = ("backend", "decoder", "isa")
"""Parameters that choose an implementation: every option is combined with each of their values."""
BACKENDS = ("backend", "decoder")
"""Parameters of the tests that have each value of each field."""
SLOW = {"triton": 4.0, "cuda": 2.0}
"""Cost of the implementations that are interpreted or emulated, against the others."""


def quick_items(items: Iterable[pytest.Item], costs: Costs, *, new: bool = False) -> list[str]:
    """Returns the names (node ids) of the items in the quick tier.

    Args:
        items: the collected items.
        costs: the recorded costs of the functions.
        new: True to add the samples of functions without a record, so that they get one.
    """
    functions = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("exhaustive") is None:
            functions[function_of(item.nodeid)].append(item)
    chosen = []
    for function, own in functions.items():
        sample = [own[index].nodeid for index in cover([_parameters(item) for item in own])]
        if (
            any(item.get_closest_marker("quick") for item in own)
            or costs.is_cheap(function, len(sample))
            or (new and function not in costs.records.quick)
        ):
            chosen += sample
    return chosen


def crossed(cases: Iterable[Any], ways: Iterable[tuple[Any, ...]] = ((),)) -> list[ParameterSet]:
    """Returns test parameters for every case in every way, such as a backend and a dtype.

    A way with a CUDA device is marked `gpu`.
    """
    ways = tuple(ways)
    return [
        pytest.param(
            case,
            *way,
            id="-".join(map(str, (case, *way))),
            marks=[pytest.mark.gpu] if torch.device("cuda") in way else [],
        )
        for case in cases
        for way in ways
    ]


def each(
    names: str | tuple[str, ...], values: Iterable[Any], ids: Any = None
) -> Callable[[Callable[..., None]], Callable[[pytest.Subtests], None]]:
    """Decorator like `parametrize`, for tests of milliseconds without fixtures: makes one item with
    a subtest for each value."""
    keys = (names,) if isinstance(names, str) else names
    sets = [_arguments(keys, value) for value in values]
    if callable(ids):
        ids = ["-".join(str(ids(one)) for one in arguments.values()) for arguments in sets]
    labels = sets if ids is None else list(ids)

    def decorate(test: Callable[..., None]) -> Callable[[pytest.Subtests], None]:
        def run(subtests: pytest.Subtests) -> None:
            for label, arguments in zip(labels, sets, strict=True):
                torch.manual_seed(0)
                with subtests.test(str(label)):
                    test(**arguments)

        # Not functools.wraps: pytest would follow __wrapped__ to the arguments of the test.
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        vars(run).update(vars(test))  # markers
        return run

    return decorate


def _arguments(names: tuple[str, ...], value: Any) -> dict[str, Any]:
    if not isinstance(value, ParameterSet):
        value = ParameterSet.param(*value) if len(names) > 1 else ParameterSet.param(value)
    return dict(zip(names, value.values, strict=True))


def dearest_first(items: list[pytest.Item], seconds: Mapping[str, float]) -> None:
    """Sorts the items by the recorded seconds of their files, so that no long test is left to the
    end. Files stay together, because their tests share fixtures."""
    total = defaultdict[Path, float](float)
    for item in items:
        total[item.path] += seconds.get(function_of(item.nodeid), 0.0)
    items.sort(key=lambda item: -total[item.path])


def _parameters(item: pytest.Item) -> Mapping[str, Any]:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def cover(parameters: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the indices of few parameter sets that together have every aspect.

    A greedy set cover: the next set is the one with the most missing aspects for its cost. Ties go
    to the set whose values were chosen least often, so that backends and dtypes take turns.
    """
    left = {index: frozenset(_aspects(one)) for index, one in enumerate(parameters)}
    costs = [_cost(one) for one in parameters]
    missing = frozenset[Hashable]().union(*left.values())
    used = Counter[Hashable]()
    chosen: list[int] = []
    while missing or not chosen:
        gain = {index: len(found & missing) / costs[index] for index, found in left.items()}
        best = max(gain.values())
        index = min(
            (index for index, value in gain.items() if value == best),
            key=lambda index: sum(used[aspect] for aspect in left[index]),
        )
        used.update(found := left.pop(index))
        missing -= found
        chosen.append(index)
    return sorted(chosen)


def _aspects(parameters: Mapping[str, Any]) -> Iterator[Hashable]:
    """Yields what a parameter set tests."""
    runner = tuple(parameters[name] for name in RUNNERS if name in parameters)
    has_values = any(name in parameters for name in BACKENDS)
    for name, value in parameters.items():
        if isinstance(value, AnyCase):
            for field, found in features(value):
                if has_values:
                    yield field, found
                if field != "masks" and type(found) is not int:
                    yield field, found if field == "mask" else None, runner
        else:
            yield name, _hashable(value)


def features(case: Any) -> Iterator[tuple[str, Hashable]]:
    """Yields the fields of a case that differ from the default: sizes and options.

    A mask is described by the kinds of its constraints ("mask") and their combination ("masks");
    windows are distinguished by the signs of their sides.
    """
    for field in fields(case):
        value = getattr(case, field.name)
        if field.name == "name" or value == field.default:
            continue
        if field.name == "mask":
            kinds = sorted(map(_kind, each_of(value)))
            yield from (("mask", kind) for kind in kinds)
            yield "masks", tuple(kinds)
        else:
            yield field.name, value if type(value) is int else str(value)


def _kind(constraint: Constraint) -> str:
    if isinstance(constraint, Window):
        sides = ("unbounded" if x is None else x < 0 for x in (constraint.left, constraint.right))
        return " ".join(map(str, ("Window", constraint.align, *sides)))
    return type(constraint).__name__


def _hashable(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _cost(parameters: Mapping[str, Any]) -> float:
    """Cost of a parameter set: that of the implementation, times 1, and another 1 for every 64 x 64
    query-key pairs of its case."""
    pairs = sum(_pairs(value) for value in parameters.values() if isinstance(value, AnyCase))
    slow = max(SLOW.get(str(parameters.get(name)), 1.0) for name in RUNNERS)
    return slow * (1 + pairs / 64**2)


def _pairs(case: Any) -> int:
    """Query-key pairs of a case; sizes that it lacks count as 1."""
    lengths = getattr(case, "lengths", [(getattr(case, "M", 1), getattr(case, "N", 1))])
    heads = getattr(case, "B", 1) * getattr(case, "H_q", 1)
    return int(heads * sum(M * N for M, N in lengths))
