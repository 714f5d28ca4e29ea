"""Writes recorded figures into README.md and docs/benchmarks.md.

    python -m benchmarks.report.readme <device>

The tables between the two marks of each file and the pictures under docs/images come from the last
run of each case in benchmarks/results/<device>. README.md shows the longest sequence,
docs/benchmarks.md every length.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.runner.record import RECORDED, ROOT, latest
from transformer_kernels.bench import Direction, Row, read_rows
from transformer_kernels.bench.pictures import TITLES, plot_by_length, plot_by_visible

BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"
README, DETAILS = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
DIRECTIONS: tuple[Direction, ...] = ("fwd", "fwd+bwd")
DTYPES = ("float32", "bfloat16")

HEADER = "naive bmm | torch SDPA | fused | over naive | over SDPA | peak MiB: naive, SDPA, fused |"


def causal_rows(device: str, dtype: str) -> list[Row]:
    """The last recorded rows of causal attention in one dtype."""
    rows = latest(read_rows(RECORDED / device / "attention.csv"))
    return [row for row in rows if (row.case, row.dtype) == ("causal", dtype)]


def summary(tables: Sequence[list[Row]]) -> str:
    """Markdown for README.md: the longest sequence, a line for each dtype and direction."""
    first = tables[0][0]
    length = max(row.N for row in tables[0])
    lines = [
        f"Causal attention, (B, H, S, D) = ({first.B}, {first.H_q}, {length}, {first.D}), on "
        f"{first.device} with {first.threads} threads, torch {first.torch}, {first.date[:10]}:",
        "",
        f"| | | {HEADER}",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for rows in tables:
        lines += [
            f"| {rows[0].dtype} | {TITLES[direction]} | {_cells(rows, length, direction)} |"
            for direction in DIRECTIONS
        ]
    return "\n".join(lines) + "\n"


def details(rows: list[Row]) -> str:
    """Markdown for docs/benchmarks.md: one dtype, a line for each length and direction."""
    first = rows[0]
    lines = [
        f"Causal, **{first.dtype}**, (B, H, S, D) = ({first.B}, {first.H_q}, S, {first.D}); "
        f"{first.device}, {first.threads} threads, torch {first.torch}, {first.date[:10]}.",
        "",
        f"| S | | {HEADER} error: naive, SDPA, fused |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for length in sorted({row.N for row in rows}):
        for direction in DIRECTIONS:
            errors = ", ".join(f"{row.error:.0e}" for row in _three(rows, length, direction))
            cells = _cells(rows, length, direction)
            lines.append(f"| {length} | {TITLES[direction]} | {cells} | {errors} |")
    return "\n".join(lines) + "\n"


def _three(rows: list[Row], length: int, direction: Direction) -> list[Row]:
    """The rows of naive attention, SDPA and the CPU kernels."""
    found = {(row.N, row.direction, row.variant): row for row in rows}
    return [found[length, direction, variant] for variant in ("naive", "sdpa", "cpu")]


def _cells(rows: list[Row], length: int, direction: Direction) -> str:
    three = _three(rows, length, direction)
    naive_ms, sdpa_ms, fused_ms = (row.median_ms for row in three)
    cells = [
        *(f"{row.median_ms:.1f} ms" for row in three),
        f"{naive_ms / fused_ms:.1f}x",
        f"{sdpa_ms / fused_ms:.2f}x",
        ", ".join("–" if row.peak_mib is None else f"{row.peak_mib:.0f}" for row in three),
    ]
    return " | ".join(cells)


def contents(device: str) -> dict[Path, str]:
    """The text between the marks of each file."""
    tables = [causal_rows(device, dtype) for dtype in DTYPES]
    return {README: summary(tables), DETAILS: "\n".join(map(details, tables))}


def put_between_marks(text: str, content: str) -> str:
    """The text with its part between the marks replaced. ValueError where a mark is missing."""
    for mark in (BEGIN, END):
        if text.count(mark) != 1:
            raise ValueError(f"the page must have one line {mark.strip()!r}")
    before, rest = text.split(BEGIN)
    return before + BEGIN + content + END + rest.split(END)[1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report.readme", description=__doc__)
    parser.add_argument("device", help="a folder of benchmarks/results, such as xeon-amx")
    device = parser.parse_args().device
    for page, content in contents(device).items():
        text = put_between_marks(page.read_text(encoding="utf-8"), content)
        page.write_text(text, encoding="utf-8")
    images = ROOT / "docs" / "images"
    images.mkdir(parents=True, exist_ok=True)
    by_length = [row for row in causal_rows(device, "float32") if row.direction in DIRECTIONS]
    plot_by_length(by_length, images / "attention.svg")
    masks = latest(read_rows(RECORDED / device / "masks.csv"))
    plot_by_visible(masks, images / "masks.svg")


if __name__ == "__main__":
    main()
