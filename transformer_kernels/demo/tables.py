"""Tables of the demo, rendered by rich."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from ..bench import VARIANTS, Row
from ..bench.tables import UNKNOWN, empty_table, milliseconds
from .learning import MeasuredRun


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
    table = empty_table(title, headers, text=("variant", header))
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


def learning_table(runs: Mapping[str, MeasuredRun], title: str) -> Table:
    """Table of the training runs, one line each."""
    headers = ("attention", "steps", "seconds", "ms/step", "MiB/step", "bits/byte, held out")
    table = empty_table(title, headers, text=("attention",))
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
