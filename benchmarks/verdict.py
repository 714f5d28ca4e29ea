"""Whether the goals of goals.py are reached: `python -m benchmarks.verdict [CSV ...] [--markdown]`.

It takes the last run of each case in rows of the suite `cpu`. Beside a goal stands the figure that
is farthest from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.goals import GOALS, Goal
from benchmarks.record import RECORDED, latest
from transformer_kernels.bench import Row, read_rows


class Judged(NamedTuple):
    """A goal as a line of the table."""

    goal: str
    bound: str
    measured: str
    verdict: str
    worst: str


TITLES = Judged("goal", "asked", "measured", "verdict", "worst case")
MISSING = "not measured"


def judge(rows: Iterable[Row], goals: Sequence[Goal] = GOALS) -> list[Judged]:
    """A line for each goal; `rows` are those of one device, each case once."""
    kept = [row for row in rows if row.suite == "cpu"]
    return [_judged(goal, kept) for goal in goals]


def _judged(goal: Goal, rows: list[Row]) -> Judged:
    figures = goal.figures(rows)
    if not figures:
        return Judged(goal.what, goal.bound, "", MISSING, "")
    measured = goal.measured(figures)
    verdict = "pass" if goal.reached(measured) else "FALL SHORT"
    worst = f"{figures[0].ratio:.2f} ({figures[0]})"
    return Judged(goal.what, goal.bound, f"{measured:.2f} of {len(figures)}", verdict, worst)


def as_columns(judged: Sequence[Judged]) -> list[str]:
    """Text, aligned."""
    lines = [TITLES, *judged]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def as_markdown(judged: Sequence[Judged]) -> list[str]:
    cells = [TITLES, ("---", "---:", "---:", "---", "---"), *judged]
    return [f"| {' | '.join(line)} |" for line in cells]


def provenance(rows: Sequence[Row]) -> str:
    """Where, with what and when the rows were taken; the last, where they differ."""
    last = max(rows, key=lambda row: row.date)
    return f"{last.device}, torch {last.torch}, commit {last.commit}, {last.date[:10]}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verdict", description=__doc__)
    parser.add_argument("csv", nargs="*", type=Path, help="default: every recorded one")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    for path in args.csv or sorted(RECORDED.glob("*/cpu.csv")):
        rows = latest(read_rows(path))
        judged = judge(rows)
        print(provenance(rows), end="\n\n")
        print(*(as_markdown if args.markdown else as_columns)(judged), sep="\n")
        passed = sum(line.verdict == "pass" for line in judged)
        print(f"\n{passed} of {len(judged)} goals are reached.")


if __name__ == "__main__":
    main()
