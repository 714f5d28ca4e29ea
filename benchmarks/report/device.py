"""Writes one report of all rows of a device, `report.md` and `report.html`, beside them.

    python -m benchmarks.report.device [FOLDER ...]

Without a folder: build/benchmarks, where `make bench` puts its rows. What is slower than a peer
comes first, then the goals, then every suite.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.goals.check import MISSING, Check, check_goals
from benchmarks.goals.goal import Figure
from benchmarks.report.plot import DRAWN, pictures
from benchmarks.runner.ceilings import GEMM, SUM
from benchmarks.runner.record import UNRECORDED, call_of, latest, runs_of
from transformer_kernels.bench import VARIANTS, Row, read_rows
from transformer_kernels.bench.comparison.calls import Shape
from transformer_kernels.bench.pictures import TITLES
from transformer_kernels.bench.tables import UNKNOWN, milliseconds

SUITES = {
    "models": "The attention of well-known models.",
    "cpu": "The cases of the goals. *Without AMX*: in a process that may not use it.",
    "gpu": "The cases of the goals on a CUDA device.",
    "attention": "Time and memory over the sequence length.",
    "masks": "Time over the visible fraction of a mask.",
}
"""Suites in their order, with what they measure."""

CEILINGS = (GEMM, SUM, "copy")


@dataclass(frozen=True)
class Entry:
    """A call in one direction: our fastest variant, and others, each in the last run of both."""

    ours: Row
    naive: Figure | None
    peer: Figure | None
    """the fastest peer that is not naive"""
    ceiling: Figure | None

    @property
    def call(self) -> str:
        row = self.ours
        shape = Shape(B=row.B, H_q=row.H_q, H_kv=row.H_kv, M=row.M, N=row.N, D=row.D, D_v=row.D_v)
        threads = f", {row.threads} threads" if row.case.startswith("scaling") else ""
        return f"{row.case}, {row.dtype}, {shape}{threads}"

    @property
    def over_peer(self) -> float | None:
        """How many times as fast as the fastest peer."""
        return None if self.peer is None else self.peer.ratio

    @property
    def is_loss(self) -> bool:
        return self.over_peer is not None and self.over_peer < 1.0

    @property
    def cells(self) -> list[str]:
        """Cells of the table: COLUMNS."""
        return [
            self.call,
            TITLES[self.ours.direction],
            milliseconds(self.ours.median_ms),
            UNKNOWN if self.naive is None else f"{self.naive.ratio:.2f}",
            UNKNOWN if self.peer is None else f"{self.peer.ratio:.2f}",
            UNKNOWN if self.peer is None else _label(self.peer.over),
            UNKNOWN if self.ceiling is None else f"{self.ceiling.ratio:.0%}",
            UNKNOWN if self.ours.peak_mib is None else f"{self.ours.peak_mib:.1f}",
            f"{self.ours.error:.0e}",
        ]


COLUMNS = (
    *("call", "", "ms", "x naive", "x fastest peer", "that peer", "of the limit", "MiB", "error"),
)


@dataclass(frozen=True)
class Section:
    """A suite."""

    suite: str
    about: str
    entries: list[Entry]


@dataclass(frozen=True)
class Report:
    """The last rows of a folder."""

    rows: list[Row]
    sections: list[Section]
    goals: list[Check]

    @property
    def title(self) -> str:
        return f"Benchmarks on {self.rows[0].device}"

    @property
    def provenance(self) -> str:
        def several(name: str) -> str:
            return ", ".join(sorted({str(getattr(row, name)) for row in self.rows} - {""}))

        days = sorted({row.date[:10] for row in self.rows})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        return f"torch {several('torch')}; commits {several('commit')}; {when}."

    @property
    def losses(self) -> list[Entry]:
        """Calls where a peer is faster, worst first."""
        found = [entry for section in self.sections for entry in section.entries if entry.is_loss]
        return sorted(found, key=lambda entry: entry.over_peer or 0.0)

    @property
    def compared(self) -> int:
        """Number of calls that a peer runs too."""
        return sum(entry.peer is not None for one in self.sections for entry in one.entries)


def _label(row: Row) -> str:
    return VARIANTS[row.variant].label if row.variant in VARIANTS else row.variant


def report(folder: Path) -> Report:
    """Reads the rows of a folder. Raises FileNotFoundError if it has none of a suite."""
    by_suite = {
        suite: read_rows(path) for suite in SUITES if (path := folder / f"{suite}.csv").is_file()
    }
    rows = [row for of_suite in by_suite.values() for row in of_suite]
    if not rows:
        raise FileNotFoundError(f"{folder} has no rows of the suites {', '.join(SUITES)}")
    sections = [
        Section(suite, SUITES[suite], list(entries(of_suite)))
        for suite, of_suite in by_suite.items()
    ]
    goals = [check for check in check_goals(rows) if check.status != MISSING]
    return Report(latest(rows), sections, goals)


def entries(rows: Iterable[Row]) -> Iterator[Entry]:
    """Yields the calls that a variant of ours has run, in the order of the rows."""
    calls: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        calls.setdefault(tuple(call_of(row).values()), []).append(row)
    for of_call in calls.values():
        if ours := [row for row in latest(of_call) if _is_ours(row)]:
            yield _entry(min(ours, key=lambda row: row.median_ms), of_call)


def _entry(ours: Row, of_call: Iterable[Row]) -> Entry:
    others: dict[str, Figure] = {}
    for run in reversed(runs_of(of_call)):
        for under in (row for row in run if row.variant == ours.variant):
            others |= {row.variant: Figure(row, under) for row in run}
    peers = [figure for figure in others.values() if _is_peer(figure.over)]
    return Entry(
        ours=ours,
        naive=others.get("naive"),
        peer=min(peers, key=lambda figure: figure.ratio, default=None),
        ceiling=next((others[name] for name in CEILINGS if name in others), None),
    )


def _is_ours(row: Row) -> bool:
    return row.variant in VARIANTS and not VARIANTS[row.variant].is_peer


def _is_peer(row: Row) -> bool:
    return row.variant not in ("naive", *CEILINGS) and not _is_ours(row)


def write_report(folder: Path) -> list[Path]:
    """Writes the report of a folder's rows into it.

    Returns:
        The files.

    Raises:
        FileNotFoundError: the folder has no rows of a suite.
    """
    from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined

    made = report(folder)
    loader = ChoiceLoader(
        [
            FileSystemLoader(Path(__file__).parent),
            PackageLoader("transformer_kernels.bench.comparison", "."),
        ]
    )
    written = []
    for name in ("report.md", "report.html"):
        environment = Environment(
            loader=loader,
            autoescape=name.endswith("html"),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        drawn = list(_drawings(folder)) if name.endswith("html") else []
        text = environment.get_template(f"{name}.jinja").render(
            report=made, columns=COLUMNS, drawings=drawn
        )
        (folder / name).write_text(text, encoding="utf-8")
        written.append(folder / name)
    return written


def _drawings(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields titles and SVG texts of the suites that vary one parameter."""
    with tempfile.TemporaryDirectory() as drawn:
        for suite in DRAWN:
            if (path := folder / f"{suite}.csv").is_file():
                for picture in pictures(path, Path(drawn), suffix=".svg"):
                    svg = picture.read_text(encoding="utf-8")
                    yield picture.stem.replace("-", ", "), svg[svg.index("<svg") :]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report.device",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="*", type=Path, help="default: build/benchmarks")
    for folder in parser.parse_args().folder or [UNRECORDED]:
        try:
            print(*write_report(folder), sep="\n")
        except FileNotFoundError as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
