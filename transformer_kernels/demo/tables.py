"""The demo's tables, by rich."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from transformer_kernels.bench import VARIANTS, Direction, Row
from transformer_kernels.bench.pictures import TITLES
from transformer_kernels.demo.learning import Learned

UNKNOWN = "–"


def speed_table(rows: Sequence[Row], direction: Direction) -> Table:
    """A line a length and variant: time and its spread, gain over naive, memory, error."""
    headers = ("length", "variant", "ms", "20% .. 80%", "gain", "MiB", "error")
    table = _table(f"causal attention, float32, {TITLES[direction]}", headers, text=("variant",))
    found = {(row.N, row.variant): row for row in rows if row.direction == direction}
    for length in sorted({length for length, _ in found}):
        naive = found[length, "naive"]
        shown = str(length)
        for name, variant in VARIANTS.items():
            if (length, name) in found:
                table.add_row(shown, variant.label, *_speed_cells(found[length, name], naive))
                shown = ""
        table.add_section()
    return table


def _speed_cells(row: Row, naive: Row) -> list[str]:
    return [
        milliseconds(row.median_ms),
        f"{milliseconds(row.p20_ms)} .. {milliseconds(row.p80_ms)}",
        f"{naive.median_ms / row.median_ms:.1f}x",
        UNKNOWN if row.peak_mib is None else f"{row.peak_mib:.1f}",
        f"{row.error:.1e}",
    ]


def milliseconds(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def learning_table(learned: Mapping[str, Learned], title: str) -> Table:
    """A line a run."""
    headers = ("attention", "seconds", "ms a step", "MiB a step", "bits/byte, held out")
    table = _table(title, headers, text=("attention",))
    for name, run in learned.items():
        result = run.result
        table.add_row(
            name,
            f"{result.seconds:.1f}",
            f"{1e3 * result.seconds / len(result.rows):.1f}",
            UNKNOWN if run.peak_bytes is None else f"{run.peak_bytes / 2**20:.0f}",
            UNKNOWN if result.score is None else f"{result.score:.4f}",
        )
    return table


def _table(title: str, headers: Sequence[str], *, text: Sequence[str]) -> Table:
    """Columns of numbers are flush right, those of `text` flush left."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for header in headers:
        table.add_column(header, justify="left" if header in text else "right", no_wrap=True)
    return table
