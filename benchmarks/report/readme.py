"""Puts recorded figures into README.md: `python -m benchmarks.report.readme <device>`.

The tables between the two marks, and the pictures under docs/images, are made from the last run of
each case in benchmarks/results/<device>; nothing in them is written by hand.
"""

from __future__ import annotations

import argparse

from benchmarks.runner.record import RECORDED, ROOT, latest
from transformer_kernels.bench import Direction, Row, read_rows
from transformer_kernels.bench.pictures import TITLES, plot_by_length, plot_by_visible

BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"
DIRECTIONS: tuple[Direction, ...] = ("fwd", "fwd+bwd")


DTYPES = ("float32", "bfloat16")


def shown_rows(device: str, dtype: str) -> list[Row]:
    """Those of one of the README's tables: causal, of one dtype."""
    rows = latest(read_rows(RECORDED / device / "attention.csv"))
    return [row for row in rows if (row.case, row.dtype) == ("causal", dtype)]


def all_figures(device: str) -> str:
    """Markdown: the tables of every dtype that the README shows."""
    return "\n".join(figures(shown_rows(device, dtype)) for dtype in DTYPES)


def figures(rows: list[Row]) -> str:
    """Markdown: what was measured where, and a table with a line a length and direction."""
    first = rows[0]
    lines = [
        f"Causal, **{first.dtype}**, (B, H, S, D) = ({first.B}, {first.H_q}, S, {first.D}); "
        f"{first.device}, {first.threads} threads, torch {first.torch}, {first.date[:10]}.",
        "",
        "| S | | naive bmm | torch SDPA | fused | over naive | over SDPA "
        "| MiB: naive, SDPA, fused | error: naive, SDPA, fused |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    found = {(row.N, row.direction, row.variant): row for row in rows}
    for length in sorted({row.N for row in rows}):
        for direction in DIRECTIONS:
            three = [found[length, direction, variant] for variant in ("naive", "sdpa", "cpu")]
            naive_ms, sdpa_ms, fused_ms = (row.median_ms for row in three)
            cells = [
                str(length),
                TITLES[direction],
                *(f"{row.median_ms:.1f} ms" for row in three),
                f"{naive_ms / fused_ms:.1f}x",
                f"{sdpa_ms / fused_ms:.2f}x",
                ", ".join("–" if row.peak_mib is None else f"{row.peak_mib:.0f}" for row in three),
                ", ".join(f"{row.error:.0e}" for row in three),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def put_between_marks(text: str, content: str) -> str:
    """ValueError where the text lacks one of the marks."""
    for mark in (BEGIN, END):
        if text.count(mark) != 1:
            raise ValueError(f"README.md must have one line {mark.strip()!r}")
    before, rest = text.split(BEGIN)
    return before + BEGIN + content + END + rest.split(END)[1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report.readme", description=__doc__)
    parser.add_argument("device", help="a folder of benchmarks/results, such as xeon-amx")
    device = parser.parse_args().device
    rows = shown_rows(device, "float32")
    readme, images = ROOT / "README.md", ROOT / "docs" / "images"
    text = put_between_marks(readme.read_text(encoding="utf-8"), all_figures(device))
    readme.write_text(text, encoding="utf-8")
    images.mkdir(parents=True, exist_ok=True)
    plot_by_length([r for r in rows if r.direction in DIRECTIONS], images / "attention.svg")
    masks = latest(read_rows(RECORDED / device / "masks.csv"))
    plot_by_visible(masks, images / "masks.svg")


if __name__ == "__main__":
    main()
