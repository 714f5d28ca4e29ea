"""Measurements as CSV: one row per case, direction and variant."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from .cases import SIZES, Case, Direction
from .provenance import Provenance
from .timer import Timing


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement. The fields are the CSV columns, in order.

    `visible`, `tflops`, `gbytes_s` and `error` are NaN where they have no meaning, as those of a
    training step.
    """

    date: str
    commit: str
    device: str
    torch: str
    triton: str
    cuda: str
    threads: int
    suite: str
    case: str
    dtype: str
    B: int
    H_q: int
    H_kv: int
    M: int
    N: int
    D: int
    D_v: int
    mask: str
    visible: float
    """fraction of the M x N pairs that are visible"""
    dropout_p: float
    direction: Direction
    variant: str
    median_ms: float
    p20_ms: float
    p80_ms: float
    tflops: float
    """counts visible pairs only; see `Case.operations`"""
    gbytes_s: float
    """counts each input and output once; see `Case.traffic`"""
    peak_mib: float | None
    """see `peak_extra_bytes`; None if the system cannot measure it"""
    error: float
    """largest error against float64, relative to the largest value"""
    slower: float | None = None
    """how much slower than usual the machine was, as a fraction, if another process disturbed every
    try; times of rows that were measured together still have the right ratios"""


COLUMNS = tuple(field.name for field in fields(Row))


def make_row(
    provenance: Provenance,
    *,
    suite: str,
    case: Case,
    direction: Direction,
    variant: str,
    timing: Timing,
    peak_bytes: int | None,
    error: float,
) -> Row:
    """Builds a row, with its throughput computed from the median time."""
    seconds = timing.median_ms / 1e3
    return Row(
        **vars(provenance),
        suite=suite,
        case=case.name,
        dtype=case.dtype_name,
        **{name: getattr(case, name) for name in SIZES},
        mask=case.mask_name,
        visible=case.visible,
        dropout_p=case.dropout_p,
        direction=direction,
        variant=variant,
        median_ms=timing.median_ms,
        p20_ms=timing.p20_ms,
        p80_ms=timing.p80_ms,
        tflops=case.operations(direction) / seconds / 1e12,
        gbytes_s=case.traffic(direction) / seconds / 1e9,
        peak_mib=None if peak_bytes is None else peak_bytes / 2**20,
        error=error,
    )


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes the rows to a new file, replacing an existing one."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(map(_cells, rows))


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Appends rows to a file, which is created if missing.

    Raises:
        ValueError: the file has other columns.
    """
    if not path.exists():
        write_rows(path, rows)
        return
    with path.open(newline="", encoding="utf-8") as file:
        header = tuple(next(csv.reader(file), ()))
    if header != COLUMNS:
        raise ValueError(f"{path}: expected the columns of Row, got {', '.join(header)}")
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(map(_cells, rows))


def read_rows(path: Path) -> list[Row]:
    """Reads a file written by `write_rows` or `append_rows`."""
    with path.open(newline="", encoding="utf-8") as file:
        return [row_from(record) for record in csv.DictReader(file)]


def row_values(row: Row) -> dict[str, str]:
    """Returns the cells of a row by column; floats have four significant digits, the precision of
    the clock."""
    cells = {}
    for name, value in vars(row).items():
        if isinstance(value, float):
            cells[name] = f"{value:.4g}"
        else:
            cells[name] = "" if value is None else str(value)
    return cells


def _cells(row: Row) -> list[str]:
    return list(row_values(row).values())


def row_from(cells: Mapping[str, str]) -> Row:
    """Returns the row of the cells by column.

    Raises:
        KeyError: a column is missing.
        ValueError: a cell is not a number where the column needs one.
    """
    values: dict[str, Any] = {}
    for name, kind in get_type_hints(Row).items():
        text = cells[name]
        if kind in (int, float):
            values[name] = kind(text)
        elif kind == float | None:
            values[name] = float(text) if text else None
        else:
            values[name] = text
    return Row(**values)
