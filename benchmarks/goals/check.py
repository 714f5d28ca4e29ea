"""Compares recorded rows with the performance goals of the suites `cpu`, `models` and `gpu`.

    python -m benchmarks.goals.check [CSV ...] [--markdown]

The goals are in benchmarks/goals/cpu.py and gpu.py. Ratios are those of one run, the last that
measured both variants. The table shows the worst case of each goal.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.goals.cpu import GOALS, GOALS_WITHOUT_AMX, MODEL_GOALS
from benchmarks.goals.goal import Goal
from benchmarks.goals.gpu import GPU_GOALS
from benchmarks.runner.record import RECORDED
from transformer_kernels.bench import Row, read_rows


class Check(NamedTuple):
    """One line of the table: a goal, its bound and the measured result."""

    goal: str
    bound: str
    measured: str
    status: str
    worst: str


TITLES = Check("goal", "bound", "measured", "status", "worst case")
MISSING = "not measured"

SUITES = ("cpu", "models", "gpu")


def goals_of(suite: str, device: str) -> Sequence[Goal]:
    """Goals of one of SUITES on a device."""
    on_cpu = GOALS if device.endswith("-amx") else GOALS_WITHOUT_AMX
    return {"cpu": on_cpu, "models": MODEL_GOALS, "gpu": GPU_GOALS}[suite]


def check_goals(
    rows: Iterable[Row], suites: Mapping[str, Sequence[Goal]] | None = None
) -> list[Check]:
    """Checks the goals of every suite that has rows.

    Args:
        rows: recorded rows of any runs; those of one suite from one device.
        suites: goals of each suite; those of the rows' device by default.

    Returns:
        One line per goal.
    """
    by_suite: dict[str, list[Row]] = {suite: [] for suite in suites or SUITES}
    for row in rows:
        if row.suite in by_suite:
            by_suite[row.suite].append(row)
    return [
        _check_goal(goal, own)
        for suite, own in by_suite.items()
        if own
        for goal in (suites[suite] if suites else goals_of(suite, own[0].device))
    ]


def _check_goal(goal: Goal, rows: list[Row]) -> Check:
    figures = goal.figures(rows)
    if not figures:
        return Check(goal.name, goal.bound, "", MISSING, "")
    measured = goal.measured(figures)
    status = "pass" if goal.reached(measured) else "FALL SHORT"
    worst = f"{figures[0].ratio:.2f} ({figures[0]})"
    return Check(goal.name, goal.bound, f"{measured:.2f} of {len(figures)}", status, worst)


def as_columns(checks: Sequence[Check]) -> list[str]:
    """Formats the table as text with aligned columns."""
    lines = [TITLES, *checks]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def as_markdown(checks: Sequence[Check]) -> list[str]:
    """Formats the table as Markdown."""
    cells = [TITLES, ("---", "---:", "---:", "---", "---"), *checks]
    return [f"| {' | '.join(line)} |" for line in cells]


def provenance(rows: Sequence[Row]) -> str:
    """Returns device, torch version, commit and date of the latest row."""
    last = max(rows, key=lambda row: row.date)
    return f"{last.device}, torch {last.torch}, commit {last.commit}, {last.date[:10]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goals.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("csv", nargs="*", type=Path, help="default: every recorded file")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    args = parser.parse_args()
    recorded = sorted(path for suite in SUITES for path in RECORDED.glob(f"*/{suite}.csv"))
    for path in args.csv or recorded:
        rows = read_rows(path)
        checks = check_goals(rows)
        if not checks:
            parser.error(f"{path} has no rows of the suites {', '.join(SUITES)}")
        print(provenance(rows), end="\n\n")
        print(*(as_markdown if args.markdown else as_columns)(checks), sep="\n")
        passed = sum(check.status == "pass" for check in checks)
        print(f"\n{passed} of {len(checks)} goals are reached.")


if __name__ == "__main__":
    main()
