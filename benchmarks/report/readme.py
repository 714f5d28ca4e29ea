"""Writes recorded figures into README.md and docs/benchmarks.md.

    python -m benchmarks.report.readme <device> [--models <device>]

The tables between the marks of each file and the pictures under docs/images come from the last runs
of each case in benchmarks/results/<device>. README.md shows the longest sequence,
docs/benchmarks.md every length, and the suite `models` of a device, which can be another one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cases.models import MODELS
from benchmarks.report.device import Entry, entries
from benchmarks.runner.record import RECORDED, ROOT, latest, runs_of
from transformer_kernels.bench import Direction, Row, read_rows
from transformer_kernels.bench.pictures import TITLES, plot_by_length, plot_by_visible

FIGURES, OF_MODELS = "figures", "models"
"""Names of the marks."""
README, DETAILS = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
DIRECTIONS: tuple[Direction, ...] = ("fwd", "fwd+bwd")
DTYPES = ("float32", "bfloat16")

HEADER = "naive bmm | torch SDPA | fused | over naive | over SDPA | peak MiB: naive, SDPA, fused |"


def causal_rows(device: str, dtype: str) -> list[Row]:
    """The recorded rows of causal attention in one dtype."""
    rows = read_rows(RECORDED / device / "attention.csv")
    return [row for row in rows if (row.case, row.dtype) == ("causal", dtype)]


def summary(tables: Sequence[list[Row]]) -> str:
    """Markdown for README.md: the longest sequence, a line for each dtype and direction."""
    first = latest(tables[0])[0]
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
    first = latest(rows)[0]
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
    """The rows of naive attention, SDPA and the CPU kernels, of the last run with all of them."""
    variants = ("naive", "sdpa", "cpu")
    runs = runs_of(row for row in rows if (row.N, row.direction) == (length, direction))
    by_variant = ({row.variant: row for row in run} for run in runs)
    found = next(run for run in by_variant if run.keys() >= set(variants))
    return [found[variant] for variant in variants]


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


def models(rows: Sequence[Row]) -> str:
    """Markdown for docs/benchmarks.md: the suite `models`, a line for each call and dtype."""
    first = latest(rows)[0]
    lines = [
        f"{first.device}, {first.threads} threads, torch {first.torch}, {first.date[:10]}. "
        'Forward / forward + backward; "–" was not measured.',
        "",
        "| attention of | (B, H, M, N, D) | dtype | ms | over naive | over SDPA | of the limit |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    by_call: dict[tuple[str, str], dict[str, Entry]] = {}
    for entry in entries(rows):
        row = entry.ours
        by_call.setdefault((row.case, row.dtype), {})[row.direction] = entry
    names = [name for name, _, _ in MODELS]

    def place(key: tuple[str, str]) -> tuple[int, int]:
        return names.index(key[0]), DTYPES.index(key[1])

    for case, dtype in sorted(by_call, key=place):
        of_call = by_call[case, dtype]
        row = next(iter(of_call.values())).ours
        heads = str(row.H_q) if row.H_q == row.H_kv else f"{row.H_q}/{row.H_kv}"
        # Cells of Entry: milliseconds, over naive, over the fastest peer, its name, of the limit.
        pairs = zip(*(of_call[d].cells[2:7] for d in DIRECTIONS if d in of_call), strict=True)
        ms, naive, peer, _, limit = (" / ".join(pair) for pair in pairs)
        lines.append(
            f"| {case} | ({row.B}, {heads}, {row.M}, {row.N}, {row.D}) | {dtype} "
            f"| {ms} | {naive} | {peer} | {limit} |"
        )
    return "\n".join(lines) + "\n"


def model_rows(device: str) -> list[Row]:
    """The recorded rows of the suite `models`."""
    return read_rows(RECORDED / device / "models.csv")


def contents(device: str) -> dict[Path, str]:
    """The text between the marks FIGURES of each file."""
    tables = [rows for dtype in DTYPES if (rows := causal_rows(device, dtype))]
    return {README: summary(tables), DETAILS: "\n".join(map(details, tables))}


def between_marks(text: str, name: str) -> tuple[str, str, str]:
    """The parts before, between and after the marks `name`. ValueError where a mark is missing."""
    rest, parts = text, []
    for mark in (f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"):
        if text.count(mark) != 1:
            raise ValueError(f"the page must have one line {mark.strip()!r}")
        part, rest = rest.split(mark)
        parts.append(part)
    return parts[0], parts[1], rest


def put_between_marks(text: str, content: str, name: str = FIGURES) -> str:
    """The text with its part between the marks `name` replaced."""
    before, _, after = between_marks(text, name)
    return f"{before}<!-- {name}: begin -->\n{content}<!-- {name}: end -->\n{after}"


def write(page: Path, content: str, name: str = FIGURES) -> None:
    text = put_between_marks(page.read_text(encoding="utf-8"), content, name)
    page.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report.readme", description=__doc__)
    parser.add_argument("device", help="a folder of benchmarks/results, such as xeon-amx")
    parser.add_argument("--models", metavar="DEVICE", help="device of the suite `models`")
    args = parser.parse_args()
    device = args.device
    for page, content in contents(device).items():
        write(page, content)
    if args.models:
        write(DETAILS, models(model_rows(args.models)), OF_MODELS)
    images = ROOT / "docs" / "images"
    images.mkdir(parents=True, exist_ok=True)
    by_length = [row for row in causal_rows(device, "float32") if row.direction in DIRECTIONS]
    plot_by_length(latest(by_length), images / "attention.svg")
    masks = latest(read_rows(RECORDED / device / "masks.csv"))
    plot_by_visible(masks, images / "masks.svg")


if __name__ == "__main__":
    main()
