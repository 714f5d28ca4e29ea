"""Whether the goals are reached: `python -m benchmarks.goals.check [CSV ...] [--markdown]`.

The suites `cpu` and `gpu` have goals (goals.py, gpu_goals.py). It takes the last run of each case.
Beside a goal stands the figure that is farthest from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.goals.cpu import GOALS, Goal
from benchmarks.goals.gpu import GPU_GOALS
from benchmarks.runner.record import RECORDED, latest
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

SUITES: Mapping[str, Sequence[Goal]] = {"cpu": GOALS, "gpu": GPU_GOALS}


def judge(rows: Iterable[Row], suites: Mapping[str, Sequence[Goal]] = SUITES) -> list[Judged]:
    """A line for each goal of the suites that rows are of; those of a suite are of one device, each
    case once."""
    by_suite: dict[str, list[Row]] = {suite: [] for suite in suites}
    for row in rows:
        if row.suite in by_suite:
            by_suite[row.suite].append(row)
    return [
        _judged(goal, kept) for suite, kept in by_suite.items() if kept for goal in suites[suite]
    ]


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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goals.check", description=__doc__)
    parser.add_argument("csv", nargs="*", type=Path, help="default: every recorded one")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    recorded = sorted(path for suite in SUITES for path in RECORDED.glob(f"*/{suite}.csv"))
    for path in args.csv or recorded:
        rows = latest(read_rows(path))
        judged = judge(rows)
        print(provenance(rows), end="\n\n")
        print(*(as_markdown if args.markdown else as_columns)(judged), sep="\n")
        passed = sum(line.verdict == "pass" for line in judged)
        print(f"\n{passed} of {len(judged)} goals are reached.")


if __name__ == "__main__":
    main()
