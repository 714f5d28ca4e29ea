"""Tables of the demo, rendered by rich."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.table import Table

from transformer_kernels.bench import VARIANTS, Row
from transformer_kernels.demo.learning import MeasuredRun

UNKNOWN = "–"


def speed_table(title: str, header: str, rows: Sequence[Row], label: Callable[[Row], str]) -> Table:
    """Table with one line per case and variant: times, speed-ups, memory, error.

    Speed-ups are over naive attention and SDPA. Speed-ups, memory and error are those of forward
    and backward together.

    Args:
        title: title of the table.
        header: header of the first column.
        rows: measurements.
        label: returns the case name of a row, shown in the first column.
    """
    headers = (header, "variant", "fwd ms", "both ms", "x naive", "x SDPA", "MiB", "error")
    table = _table(title, headers, text=("variant", header))
    found = {(label(row), row.variant, row.direction): row for row in rows}
    for name in dict.fromkeys(map(label, rows)):
        naive, sdpa = (found[name, peer, "fwd+bwd"] for peer in ("naive", "sdpa"))
        shown = name
        for variant in VARIANTS.values():
            if (name, variant.name, "fwd+bwd") in found:
                both = found[name, variant.name, "fwd+bwd"]
                table.add_row(
                    shown,
                    variant.label,
                    milliseconds(found[name, variant.name, "fwd"].median_ms),
                    milliseconds(both.median_ms),
                    f"{naive.median_ms / both.median_ms:.1f}",
                    f"{sdpa.median_ms / both.median_ms:.1f}",
                    UNKNOWN if both.peak_mib is None else f"{both.peak_mib:.0f}",
                    f"{both.error:.0e}",
                )
                shown = ""
        table.add_section()
    return table


def milliseconds(value: float) -> str:
    """Formats with three significant digits and no exponent."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def learning_table(runs: Mapping[str, MeasuredRun], title: str) -> Table:
    """Table of the training runs, one line each."""
    headers = ("attention", "steps", "seconds", "ms/step", "MiB/step", "bits/byte, held out")
    table = _table(title, headers, text=("attention",))
    for name, run in runs.items():
        result = run.result
        table.add_row(
            name,
            str(len(result.rows)),
            f"{result.seconds:.1f}",
            f"{1e3 * result.seconds / len(result.rows):.1f}",
            UNKNOWN if run.peak_bytes is None else f"{run.peak_bytes / 2**20:.0f}",
            UNKNOWN if result.score is None else f"{result.score:.3f}",
        )
    return table


def _table(title: str, headers: Sequence[str], *, text: Sequence[str]) -> Table:
    """Empty table; columns named in `text` are left-aligned, the others right-aligned."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in headers:
        table.add_column(header, justify="left" if header in text else "right", no_wrap=True)
    return table
