"""Recorded rows: where they are, which of them are comparable, and their table."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from transformer_kernels.bench import Case, Row
from transformer_kernels.bench.cases import SIZES
from transformer_kernels.bench.provenance import ROWS

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / ROWS
UNRECORDED = ROOT / "build" / "benchmarks"

_CALL = ("suite", "case", "dtype", *SIZES, "direction", "threads")

T = TypeVar("T")


def case_id(case: Case) -> str:
    """Name of a case in its suite."""
    return f"{case.name}-{case.dtype_name}-{case.N}"


def call_of(row: Row) -> dict[str, object]:
    """Returns the columns that identify a call: the same in every run, for every variant."""
    columns = {name: getattr(row, name) for name in _CALL}
    if row.suite == "gpu":
        del columns["threads"]  # those of the host differ between machines with the same GPU
    return columns


def latest(rows: Iterable[Row]) -> list[Row]:
    """Returns the last row of every call and variant. They can come from different runs."""
    last: dict[tuple[object, ...], Row] = {}
    for row in rows:
        key = (*call_of(row).values(), row.variant)
        if key not in last or row.date >= last[key].date:
            last[key] = row
    return list(last.values())


def runs_of(rows: Iterable[Row]) -> list[list[Row]]:
    """Returns the rows of each run, the last run first. Only rows of one run are comparable: they
    were measured in turns, on one machine."""
    by_date: dict[str, list[Row]] = {}
    for row in rows:
        by_date.setdefault(row.date, []).append(row)
    return [by_date[date] for date in sorted(by_date, reverse=True)]


def longest_ago_first(
    items: Sequence[T],
    case_of: Callable[[T], Case | None],
    rows: Iterable[Row],
    variants: Collection[str],
) -> list[T]:
    """Returns the items with their cases in another order: first those without rows, then those
    measured longest ago. The next run thus continues one that ended early.

    Args:
        items: comparisons. One whose case is None stays in its place.
        case_of: returns the case of an item.
        rows: rows of earlier runs on the device.
        variants: only rows of these count.
    """
    dates: dict[tuple[object, ...], str] = {}
    for row in rows:
        if row.variant in variants:
            key = (row.case, row.dtype, *(getattr(row, name) for name in SIZES))
            dates[key] = max(row.date, dates.get(key, ""))

    def date_of(case: Case) -> str:
        shape = (getattr(case, name) for name in SIZES)
        return dates.get((case.name, case.dtype_name, *shape), "")

    placed = [(item, case) for item in items if (case := case_of(item)) is not None]
    in_order = iter(sorted(placed, key=lambda pair: date_of(pair[1])))
    return [item if case_of(item) is None else next(in_order)[0] for item in items]


def as_text(rows: Iterable[Row]) -> list[str]:
    """Formats rows as text: a title per call, and a line per variant with its time over that of
    the first one. Figures that have no meaning for a workload are left out."""
    lines: list[str] = []
    first: Row | None = None
    for row in rows:
        if first is None or _title(row) != _title(first):
            first = row
            lines += ["", _title(row)]
        peak = "" if row.peak_mib is None else f"{row.peak_mib:8.1f} MiB"
        rates = "" if math.isnan(row.tflops) else f"{row.tflops:7.3f} TFLOP/s"
        if not math.isnan(row.gbytes_s):
            rates += f"  {row.gbytes_s:7.1f} GB/s"
        error = "" if math.isnan(row.error) else f"error {row.error:.1e}"
        line = (
            f"  {row.variant:28} {row.median_ms:10.3f} ms  ({row.p20_ms:.3f} .. {row.p80_ms:.3f})  "
            f"{row.median_ms / first.median_ms:7.3f}x  {peak}  {error}  {rates}  "
            f"threads {row.threads}"
        )
        if row.slower is not None:
            line += f"  disturbed: {row.slower:.0%} slower than usual"
        lines.append(line)
    return lines


def _title(row: Row) -> str:
    shape = f"B {row.B}, H {row.H_q}/{row.H_kv}, {row.M} x {row.N}, D {row.D}"
    return f"{row.case}, {row.dtype}, {shape}, {row.direction}"
