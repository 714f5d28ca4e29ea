"""The results in the terminal, rendered by rich."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..contenders import Measured
from ..pictures import TITLES
from ..tables import UNKNOWN, empty_table, milliseconds
from ..variants import VARIANTS
from .lines import Block, Line, blocks, disturbances, losses, omissions
from .run import Comparison
from .saved import CONFIDENCE, changes

LEGEND = (
    "ms: median of interleaved runs; half the distance of the quantiles 20% and 80%.\n"
    "x naive, x SDPA: how many times as fast. MiB: peak memory beyond q, k and v.\n"
    "limit: share of the rate of matrix products (P) or the bandwidth of memory (M)\n"
    "that was measured; it exceeds 100% where the data are in a cache.\n"
    "error: largest difference from float64, relative to the largest value."
)


def print_results(comparison: Comparison, console: Console) -> None:
    """Prints a table for each call and direction; then losses, omissions and a legend."""
    for block in blocks(comparison):
        console.print(_table(block))
    for dtype, limits in comparison.limits.items():
        console.print(f"limits in {dtype}: {limits.tflops:.3g} TFLOP/s, {limits.gbytes_s:.3g} GB/s")
    console.print(LEGEND)
    for title, lines in (
        ("Slower than a peer", losses(comparison)),
        ("Not measured", omissions(comparison)),
        ("Disturbed", disturbances(comparison)),
    ):
        if lines:
            console.print(f"\n{title}:")
            for line in lines:
                console.print(f"  {line}", markup=False, soft_wrap=True)


def print_changes(before: list[Measured], after: list[Measured], console: Console) -> None:
    """Prints what became slower or faster, with the confidence interval of each ratio."""
    found = changes(before, after)
    headers = ("call", "", "ratio", f"{CONFIDENCE:.0%} interval", "change")
    table = empty_table(
        "\nTimes, later over earlier", headers, text=("call", "", "change"), wrapped=("call",)
    )
    for change in found:
        if change.verdict != "same":
            row = change.row
            call = f"{row.B},{row.H_q},{row.H_kv},{row.M},{row.N},{row.D} {row.mask} {row.dtype}"
            table.add_row(
                escape(f"{call}, {TITLES[row.direction]}"),
                VARIANTS[row.variant].label,
                f"{change.ratio:.3f}",
                f"{change.low:.3f} to {change.high:.3f}",
                change.verdict,
            )
    if table.row_count:
        console.print(table)
    same = len(found) - table.row_count
    console.print(f"{same} of {len(found)} figures that both runs have did not change.")
    if any(change.by_control for change in found):
        console.print("Times are divided by those of torch's SDPA in the same round.")


def _table(block: Block) -> Table:
    headers = ("", "ms", "", "x naive", "x SDPA", "MiB", "limit", "error")
    table = empty_table(block.title, headers, text=("",))
    for line in block.lines:
        table.add_row(*_cells(line), style=None if line.variant.is_peer else "bold")
    return table


def _cells(line: Line) -> tuple[str, ...]:
    row = line.row
    return (
        line.variant.label,
        milliseconds(row.median_ms),
        f"±{line.spread:.0%}",
        factor(line.over_naive),
        factor(line.over_sdpa),
        UNKNOWN if row.peak_mib is None else f"{row.peak_mib:.0f}",
        f"{line.share:.0%} {line.binding[0].upper()}",
        f"{row.error:.0e}",
    )


def factor(value: float | None) -> str:
    """Formats with three significant digits."""
    if value is None:
        return UNKNOWN
    return f"{value:.2f}" if value < 10 else f"{value:.3g}" if value < 100 else f"{value:.0f}"
