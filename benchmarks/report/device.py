"""Writes one report of all rows of a device, `report.md` and `report.html`, beside them.

    python -m benchmarks.report.device [FOLDER ...]

Without a folder: build/benchmarks, where `make bench` puts its rows. What is slower than a peer
comes first, then the goals, then pictures and tables of every suite.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.goals.check import MISSING, Check, check_goals
from benchmarks.goals.goal import Figure
from benchmarks.runner.ceilings import GEMM, SUM
from benchmarks.runner.record import UNRECORDED, call_of, latest, runs_of
from transformer_kernels.bench import VARIANTS, Row, read_rows
from transformer_kernels.bench.cases import SIZES
from transformer_kernels.bench.comparison.calls import Shape
from transformer_kernels.bench.pictures import TITLES, plot_by_length, plot_by_visible
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
COLUMNS = (
    *("call", "", "ms", "x naive", "x fastest peer", "that peer", "of the limit", "MiB", "error"),
)


@dataclass(frozen=True)
class Entry:
    """A call in one direction: our fastest variant, and others, each in the last run of both."""

    ours: Row
    naive: Figure | None
    peer: Figure | None
    """the fastest peer that is not naive"""
    ceiling: Figure | None

    @property
    def is_loss(self) -> bool:
        return self.peer is not None and self.peer.ratio < 1.0

    @property
    def cells(self) -> list[str]:
        """Cells of the table: COLUMNS."""
        row = self.ours
        shape = Shape(**{name: getattr(row, name) for name in SIZES})
        threads = f", {row.threads} threads" if row.case.startswith("scaling") else ""
        peer = None if self.peer is None else self.peer.over.variant
        label = VARIANTS[peer].label if peer in VARIANTS else peer
        return [
            f"{row.case}, {row.dtype}, {shape}{threads}",
            TITLES[row.direction],
            milliseconds(row.median_ms) + ("" if row.slower is None else "*"),
            UNKNOWN if self.naive is None else f"{self.naive.ratio:.2f}",
            UNKNOWN if self.peer is None else f"{self.peer.ratio:.2f}",
            label or UNKNOWN,
            UNKNOWN if self.ceiling is None else f"{self.ceiling.ratio:.0%}",
            UNKNOWN if row.peak_mib is None else f"{row.peak_mib:.1f}",
            f"{row.error:.0e}",
        ]


class Section(NamedTuple):
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
        torch, commits = (
            ", ".join(sorted({getattr(row, name) for row in self.rows} - {""}))
            for name in ("torch", "commit")
        )
        days = sorted({row.date[:10] for row in self.rows})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        return f"torch {torch}; commits {commits}; {when}."

    @property
    def compared(self) -> list[Entry]:
        """Calls that a peer runs too, the largest loss first."""
        entries = [entry for one in self.sections for entry in one.entries]
        found = [(entry.peer.ratio, entry) for entry in entries if entry.peer is not None]
        return [entry for _, entry in sorted(found, key=lambda one: one[0])]

    @property
    def losses(self) -> list[Entry]:
        """Calls where a peer is faster, worst first."""
        return [entry for entry in self.compared if entry.is_loss]


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
    styles = PackageLoader("transformer_kernels.bench.comparison", ".")
    environment = Environment(
        loader=ChoiceLoader([FileSystemLoader(Path(__file__).parent), styles]),
        autoescape=lambda name: name is not None and "html" in name,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    files = [folder / "report.md", folder / "report.html"]
    for file in files:
        template = environment.get_template(f"{file.name}.jinja")
        text = template.render(report=made, columns=COLUMNS, drawings=drawings(made.rows))
        file.write_text(text, encoding="utf-8")
    return files


def drawings(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yields titles and SVG texts of the suites that vary one parameter."""
    plots: dict[str, Callable[[Sequence[Row], Path], None]] = {
        "attention": plot_by_length,
        "masks": plot_by_visible,
    }
    by_title: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.suite in plots:
            case = (row.case,) if row.suite == "attention" else ()
            by_title.setdefault((row.suite, *case, row.dtype), []).append(row)
    with tempfile.TemporaryDirectory() as folder:
        for title, chosen in by_title.items():
            plots[title[0]](chosen, file := Path(folder, "drawing.svg"))
            svg = file.read_text(encoding="utf-8")
            yield ", ".join(title), svg[svg.index("<svg") :]


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
