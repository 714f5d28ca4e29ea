"""What a run has measured, and where that goes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformer_kernels.bench import Budget, Provenance, Row, append_rows, write_rows
from transformer_kernels.bench.provenance import ROWS

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / ROWS
UNRECORDED = ROOT / "build" / "benchmarks"


class Recorder:
    """Collects rows, and writes each suite's to a file of its own as they come: a run that is cut
    off keeps what it has measured."""

    def __init__(self, provenance: Provenance, budget: Budget, *, folder: Path, keep: bool) -> None:
        """With `keep`, rows are added to the files in the folder's folder for their device; else
        they replace those in the folder itself."""
        self.provenance = provenance
        self.budget = budget
        self._folder = folder
        self._keep = keep
        self.rows: list[Row] = []
        self.left_out: list[str] = []
        """Who was not measured at what, and why"""

    def add(self, rows: Iterable[Row]) -> None:
        """Makes or extends one file a suite."""
        new = list(rows)
        self.rows += new
        for path, of_path in self._by_path(new).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._keep:
                append_rows(path, of_path)
            else:
                write_rows(path, self._by_path(self.rows)[path])

    @property
    def paths(self) -> list[Path]:
        """The files that have the rows."""
        return list(self._by_path(self.rows))

    def _by_path(self, rows: Iterable[Row]) -> dict[Path, list[Row]]:
        by_path: dict[Path, list[Row]] = {}
        for row in rows:
            folder = self._folder / row.device if self._keep else self._folder
            by_path.setdefault(folder / f"{row.suite}.csv", []).append(row)
        return by_path


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of every case and direction the rows of the last run that measured it."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        key = (row.suite, row.case, row.dtype, row.B, row.H_q, row.M, row.N, row.D, row.direction)
        group = groups.setdefault(key, [])
        if group and row.date > group[0].date:
            group.clear()
        if not group or row.date == group[0].date:
            group.append(row)
    return [row for group in groups.values() for row in group]


def as_text(rows: Iterable[Row]) -> list[str]:
    """One line a row, with a blank line between cases."""
    lines: list[str] = []
    before: tuple[object, ...] = ()
    for row in rows:
        here = (row.case, row.dtype, row.N, row.D, row.direction)
        if here != before:
            title = f"{row.case}, {row.dtype}, {row.M} x {row.N}, D {row.D}, {row.direction}"
            lines += ["", title]
            before = here
        peak = "" if row.peak_mib is None else f"{row.peak_mib:8.1f} MiB"
        lines.append(
            f"  {row.variant:14} {row.median_ms:9.3f} ms  ({row.p20_ms:.3f} .. {row.p80_ms:.3f})  "
            f"{row.tflops:7.3f} TFLOP/s  {row.gbytes_s:7.1f} GB/s  {peak}  error {row.error:.1e}  "
            f"threads {row.threads}"
        )
    return lines
