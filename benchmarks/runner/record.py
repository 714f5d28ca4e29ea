"""Recording of measured rows in CSV files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from transformer_kernels.bench import Budget, Provenance, Row, append_rows, write_rows
from transformer_kernels.bench.provenance import CPU, ROWS
from transformer_kernels.bench.steadiness import TOLERANCE, Probe, Watch, measure_steadily

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / ROWS
UNRECORDED = ROOT / "build" / "benchmarks"

_CALL = (
    *("suite", "case", "dtype", "B", "H_q", "H_kv", "M", "N", "D", "D_v", "direction", "threads"),
)


class Recorder:
    """Collects rows and writes them immediately, one file per suite: an aborted run loses none."""

    def __init__(
        self,
        provenance: Provenance,
        budget: Budget,
        *,
        folder: Path,
        keep: bool,
        tolerance: float = TOLERANCE,
    ) -> None:
        """Creates a recorder.

        Args:
            provenance: shared columns of the rows.
            budget: default time budget of a case.
            folder: destination.
            keep: append to `folder/<device>/<suite>.csv`; otherwise replace `folder/<suite>.csv`.
            tolerance: how much slower than usual the machine may be, as a fraction, if rows are
                kept.
        """
        self.provenance = provenance
        self.budget = budget
        self._folder = folder
        self._keep = keep
        self._tolerance = tolerance
        self.rows: list[Row] = []
        self._watches: dict[torch.device, Watch] = {}
        self.skipped: list[str] = []
        """cases and variants that were not measured, with reasons"""

    def add_steady(
        self, label: str, measure: Callable[[], list[Row]], device: torch.device = CPU
    ) -> list[Row]:
        """Measures and adds rows.

        If rows are kept, the machine is watched: a measurement is repeated while another process
        disturbs it, and left out after TRIES.

        Args:
            label: name of the measurement.
            measure: measures once.
            device: device of the tensors.

        Returns:
            The rows; none if they were left out.
        """
        if not self._keep:
            rows = measure()
        else:
            watch = self._watches.setdefault(device, Watch(Probe(device)))
            steady = measure_steadily(
                [label], lambda _: measure(), watch, tolerance=self._tolerance
            )
            rows = [row for _, result in steady.results for row in result]
            self.skipped += [
                f"{label}: the machine was {one.slower:.0%} slower than usual during the last try"
                for one in steady.disturbed
            ]
        self.add(rows)
        return rows

    def add(self, rows: Iterable[Row]) -> None:
        """Adds rows and writes them to the file of their suite."""
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
        """Files that contain the rows."""
        return list(self._by_path(self.rows))

    def _by_path(self, rows: Iterable[Row]) -> dict[Path, list[Row]]:
        by_path: dict[Path, list[Row]] = {}
        for row in rows:
            folder = self._folder / row.device if self._keep else self._folder
            by_path.setdefault(folder / f"{row.suite}.csv", []).append(row)
        return by_path


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


def as_text(rows: Iterable[Row]) -> list[str]:
    """Formats rows as text, one line per row, with a title per case."""
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
