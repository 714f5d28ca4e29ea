"""Order of cases in a suite with a time limit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from transformer_kernels.bench import Case, Row

T = TypeVar("T")

_SHAPE = ("B", "H_q", "H_kv", "M", "N", "D", "D_v")


def longest_ago_first(
    items: Sequence[T],
    case_of: Callable[[T], Case | None],
    rows: Iterable[Row],
    variants: Collection[str],
) -> list[T]:
    """Returns the items with their cases in another order: first those without rows, then those
    measured longest ago. The next run thus continues one that ended early.

    Args:
        items: tests. One whose case is None stays in its place.
        case_of: returns the case of an item.
        rows: rows of earlier runs on the device.
        variants: only rows of these count.
    """
    dates: dict[tuple[object, ...], str] = {}
    for row in rows:
        if row.variant in variants:
            key = (row.case, row.dtype, *(getattr(row, name) for name in _SHAPE))
            dates[key] = max(row.date, dates.get(key, ""))

    def date_of(case: Case) -> str:
        shape = (getattr(case, name) for name in _SHAPE)
        return dates.get((case.name, case.dtype_name, *shape), "")

    placed = [(item, case) for item in items if (case := case_of(item)) is not None]
    in_order = iter(sorted(placed, key=lambda pair: date_of(pair[1])))
    return [item if case_of(item) is None else next(in_order)[0] for item in items]
