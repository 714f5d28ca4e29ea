"""Writes recorded figures into README.md and docs/benchmarks.md.

    python -m benchmarks.report.readme <device> [--models <device>]

The tables between the marks of each file and the pictures under docs/images come from the last runs
of each case in benchmarks/results. README.md shows the calls GAINS of several devices,
docs/benchmarks.md every length of <device>, and the suite `models` of a device, which can be
another one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from benchmarks.report.device import Entry, entries
from benchmarks.runner.record import RECORDED, ROOT, latest, runs_of
from benchmarks.suites.models import MODELS
from transformer_kernels.bench import Direction, Row, read_rows
from transformer_kernels.bench.pictures import TITLES, plot_by_length, plot_by_visible
from transformer_kernels.bench.tables import UNKNOWN

README, DETAILS = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
DIRECTIONS: tuple[Direction, ...] = ("fwd", "fwd+bwd")
DTYPES = ("float32", "bfloat16")

GAINS = (
    ("Intel Xeon, AMX", "xeon-amx", "attention", "causal", 4096, 64),
    ("AMD EPYC, AVX-512", "epyc-avx512", "attention", "causal", 4096, 64),
    ("NVIDIA H200", "nvidia-h200", "gpu", "causal", 8192, 128),
    ("NVIDIA H200", "nvidia-h200", "gpu", "masks: 25% of blocks", 8192, 128),
)
"""Name of a device, its folder, suite, case, N and D of the calls in README.md."""

HEADER = "naive bmm | torch SDPA | fused | over naive | over SDPA | peak MiB: naive, SDPA, fused |"


def gains() -> str:
    """Markdown for README.md: a line for each call of GAINS and dtype."""
    lines, days = [], set[str]()
    for name, device, suite, case, N, D in GAINS:
        found: dict[tuple[str, Direction], Entry] = {
            (entry.ours.dtype, entry.ours.direction): entry
            for entry in entries(read_rows(RECORDED / device / f"{suite}.csv"))
            if (entry.ours.case, entry.ours.N, entry.ours.D, entry.ours.D_v) == (case, N, D, D)
        }
        for dtype in DTYPES:
            if (dtype, "fwd") in found:
                pair = [found[dtype, "fwd"], found[dtype, "bwd"]]
                days.update(entry.ours.date[:10] for entry in pair)
                # The call, milliseconds, over naive, over the fastest peer, its name.
                call, _, *both = zip(*(entry.cells[:6] for entry in pair), strict=True)
                ms, naive, peer, peers = (" / ".join(dict.fromkeys(cells)) for cells in both)
                lines.append(f"| {name} | {call[0]} | {ms} | {naive} | {peer} ({peers}) |")
    return _text(
        f"Forward / backward, measured from {min(days)} to {max(days)}:",
        "",
        "| on | attention | ms | times naive bmm | times the fastest other |",
        "|---|---|---:|---:|---|",
        *lines,
    )


def figures(device: str) -> str:
    """Markdown for docs/benchmarks.md: causal attention of a device, a table for each dtype."""
    rows = read_rows(RECORDED / device / "attention.csv")
    by_dtype = ([row for row in rows if (row.case, row.dtype) == ("causal", x)] for x in DTYPES)
    return "\n".join(details(table) for table in by_dtype if table)


def details(rows: list[Row]) -> str:
    """Markdown for docs/benchmarks.md: one dtype, a line for each length and direction."""
    first = latest(rows)[0]
    lines = []
    for length in sorted({row.N for row in rows}):
        for direction in DIRECTIONS:
            if three := _three(rows, length, direction):
                errors = ", ".join(f"{row.error:.0e}" for row in three)
                lines.append(f"| {length} | {TITLES[direction]} | {_cells(three)} | {errors} |")
    return _text(
        f"Causal, **{first.dtype}**, (B, H, S, D) = ({first.B}, {first.H_q}, S, {first.D}); "
        f"{first.device}, {first.threads} threads, torch {first.torch}, {first.date[:10]}.",
        "",
        f"| S | | {HEADER} error: naive, SDPA, fused |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
        *lines,
    )


def _text(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def _three(rows: list[Row], length: int, direction: Direction) -> list[Row]:
    """The rows of naive attention, SDPA and the CPU kernels, of the last run with all of them.

    Empty if there is none: naive attention is left out where it would take too long.
    """
    variants = ("naive", "sdpa", "cpu")
    runs = runs_of(row for row in rows if (row.N, row.direction) == (length, direction))
    by_variant = ({row.variant: row for row in run} for run in runs)
    found = (run for run in by_variant if run.keys() >= set(variants))
    return [run[variant] for run in islice(found, 1) for variant in variants]


def _cells(three: Sequence[Row]) -> str:
    naive_ms, sdpa_ms, fused_ms = (row.median_ms for row in three)
    cells = [
        *(f"{row.median_ms:.1f} ms" for row in three),
        f"{naive_ms / fused_ms:.1f}x",
        f"{sdpa_ms / fused_ms:.2f}x",
        ", ".join(UNKNOWN if row.peak_mib is None else f"{row.peak_mib:.0f}" for row in three),
    ]
    return " | ".join(cells)


def models(rows: Sequence[Row]) -> str:
    """Markdown for docs/benchmarks.md: the suite `models`, a line for each call and dtype."""
    first = latest(rows)[0]
    by_call: dict[tuple[str, str], dict[str, Entry]] = {}
    for entry in entries(rows):
        by_call.setdefault((entry.ours.case, entry.ours.dtype), {})[entry.ours.direction] = entry
    lines = []
    for name, _, _ in MODELS:
        for dtype in DTYPES:
            of_call = by_call.get((name, dtype), {})
            found = [of_call[direction] for direction in DIRECTIONS if direction in of_call]
            if found:
                row = found[0].ours
                heads = str(row.H_q) if row.H_q == row.H_kv else f"{row.H_q}/{row.H_kv}"
                # Milliseconds, over naive, over the fastest peer, its name, of the limit.
                pairs = zip(*(entry.cells[2:7] for entry in found), strict=True)
                ms, naive, peer, _, limit = (" / ".join(pair) for pair in pairs)
                lines.append(
                    f"| {name} | ({row.B}, {heads}, {row.M}, {row.N}, {row.D}) | {dtype} "
                    f"| {ms} | {naive} | {peer} | {limit} |"
                )
    return _text(
        f"{first.device}, {first.threads} threads, torch {first.torch}, {first.date[:10]}. "
        f'Forward / forward + backward; "{UNKNOWN}" was not measured.',
        "",
        "| attention of | (B, H, M, N, D) | dtype | ms | over naive | over SDPA | of the limit |",
        "|---|---|---|---:|---:|---:|---:|",
        *lines,
    )


def between_marks(text: str, name: str) -> tuple[str, str, str]:
    """The parts before, between and after the marks `name`. ValueError where a mark is missing."""
    begin, end = (f"<!-- {name}: {side} -->\n" for side in ("begin", "end"))
    for mark in (begin, end):
        if text.count(mark) != 1:
            raise ValueError(f"the page must have one line {mark.strip()!r}")
    before, _, rest = text.partition(begin)
    between, _, after = rest.partition(end)
    return before + begin, between, end + after


def write(page: Path, name: str, content: str) -> None:
    """Replaces the text of a page between the marks `name`."""
    before, _, after = between_marks(page.read_text(encoding="utf-8"), name)
    page.write_text(before + content + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report.readme", description=__doc__)
    parser.add_argument("device", help="a folder of benchmarks/results, such as xeon-amx")
    parser.add_argument("--models", metavar="DEVICE", help="device of the suite `models`")
    args = parser.parse_args()
    write(README, "gains", gains())
    write(DETAILS, "figures", figures(args.device))
    if args.models:
        write(DETAILS, "models", models(read_rows(RECORDED / args.models / "models.csv")))
    folder, images = RECORDED / args.device, ROOT / "docs" / "images"
    by_length = [
        row
        for row in latest(read_rows(folder / "attention.csv"))
        if (row.case, row.dtype) == ("causal", "float32") and row.direction in DIRECTIONS
    ]
    plot_by_length(by_length, images / "attention.svg")
    plot_by_visible(latest(read_rows(folder / "masks.csv")), images / "masks.svg")


if __name__ == "__main__":
    main()
