"""Draws figures of recorded rows: `python -m benchmarks.report.plot [CSV ...] [--out DIR]`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.runner.record import RECORDED, ROOT, latest
from transformer_kernels.bench import Row, read_rows
from transformer_kernels.bench.pictures import plot_by_length, plot_by_visible

DRAWN = ("attention", "masks")
"""Suites that vary one parameter. `benchmarks.goals.check` evaluates the suites `cpu` and `gpu`."""


def pictures(path: Path, out: Path, *, suffix: str) -> Iterator[Path]:
    """Draws the last rows of each case in a CSV file of a suite in DRAWN; yields the images."""
    rows = latest(read_rows(path))
    for suite, case, dtype in dict.fromkeys(map(_picture_of, rows)):
        chosen = [row for row in rows if _picture_of(row) == (suite, case, dtype)]
        name = "-".join(part for part in (suite, case, dtype) if part)
        picture = out / f"{name}{suffix}"
        (plot_by_visible if suite == "masks" else plot_by_length)(chosen, picture)
        yield picture


def _picture_of(row: Row) -> tuple[str, str, str]:
    """Key of the figure that a row belongs to."""
    return row.suite, "" if row.suite == "masks" else row.case, row.dtype


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report.plot", description=__doc__)
    parser.add_argument("csv", nargs="*", type=Path, help=f"default: the recorded {DRAWN}")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "benchmarks", metavar="DIR")
    parser.add_argument("--suffix", choices=(".png", ".svg"), default=".png")
    args = parser.parse_args()
    recorded = sorted(path for suite in DRAWN for path in RECORDED.glob(f"*/{suite}.csv"))
    for path in args.csv or recorded:
        folder = args.out / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        for picture in pictures(path, folder, suffix=args.suffix):
            print(picture)


if __name__ == "__main__":
    main()
