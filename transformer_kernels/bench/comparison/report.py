"""The results of a comparison: tables in the terminal, and a page, which is one HTML file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from ..contenders import Measured
from ..pictures import COLOURS, TITLES
from ..rows import Row
from ..tables import UNKNOWN, empty_table, milliseconds
from ..variants import VARIANTS, Variant
from .run import Comparison
from .saved import CONFIDENCE, changes

LEGEND = (
    "ms: median of interleaved runs; half the distance of the quantiles 20% and 80%.\n"
    "x naive, x SDPA: how many times as fast. MiB: peak memory beyond q, k and v.\n"
    "limit: share of the rate of matrix products (P) or the bandwidth of memory (M)\n"
    "that was measured; it exceeds 100% where the data are in a cache.\n"
    "error: largest difference from float64, relative to the largest value."
)
_EXACT = 1e-17
"""Error at which a bar of the error chart has no length; its scale is logarithmic."""


@dataclass(frozen=True)
class Line:
    """One variant of a call, in one direction."""

    variant: Variant
    row: Row
    share: float
    """time of the machine's limit over the time of the call"""
    binding: str
    """what limits the call: `products` or `memory`"""
    over_naive: float | None
    """how many times as fast as naive attention; None if that was not measured"""
    over_sdpa: float | None
    """how many times as fast as torch's SDPA; None if that was not measured"""

    @property
    def spread(self) -> float:
        """Half the distance between the quantiles of 20% and 80%, over the median."""
        return (self.row.p80_ms - self.row.p20_ms) / 2 / self.row.median_ms


@dataclass(frozen=True)
class Block:
    """The variants of a call, in one direction."""

    title: str
    lines: list[Line]

    @property
    def loss(self) -> str | None:
        """The fastest peer, if it is faster than all variants of ours."""
        ours = [line.row.median_ms for line in self.lines if not line.variant.is_peer]
        peers = [line for line in self.lines if line.variant.is_peer]
        if not ours or not peers:
            return None
        peer = min(peers, key=lambda line: line.row.median_ms)
        ratio = min(ours) / peer.row.median_ms
        return f"{peer.variant.label} is {ratio:.2f} times as fast" if ratio > 1.0 else None


def blocks(comparison: Comparison) -> Iterator[Block]:
    """Yields the results in the order of the calls."""
    for call, result in comparison.results:
        for direction in call.directions:
            rows = [one.row for one in result.measured if one.row.direction == direction]
            times = {row.variant: row.median_ms for row in rows}

            def over(peer: str, row: Row, times: dict[str, float] = times) -> float | None:
                return times[peer] / row.median_ms if peer in times else None

            limits = comparison.limits[call.dtype_name]
            lines = [
                Line(
                    variant=VARIANTS[row.variant],
                    row=row,
                    share=limits.share(row),
                    binding=limits.binding(row),
                    over_naive=over("naive", row),
                    over_sdpa=over("sdpa", row),
                )
                for row in rows
            ]
            if lines:
                name = f"{call.name}: " if call.name else ""
                yield Block(f"{name}{call}, {TITLES[direction]}", lines)


def notes(comparison: Comparison) -> dict[str, list[str]]:
    """Returns what to know about the results, by title: losses; what was not measured, or not at
    its own length; calls during which the machine was disturbed in every try."""
    missing = []
    for call, result in comparison.results:
        for name, reason in result.broken.items():
            missing.append(f"{call}: {VARIANTS[name].label} FAILED: {reason}")
        for name, reason in result.skipped.items():
            missing.append(f"{call}: {VARIANTS[name].label} is not measured: {reason}")
        if result.checked_tokens != call.shape.N:
            missing.append(f"{call}: errors are those with {result.checked_tokens} keys")
    found = {
        "Slower than a peer": [
            f"{block.title}: {block.loss}" for block in blocks(comparison) if block.loss
        ],
        "Not measured": missing,
        "Disturbed": [
            f"{one.item}: the machine was up to {one.slower:.0%} slower than usual"
            for one in comparison.calls.disturbed
        ],
    }
    return {title: lines for title, lines in found.items() if lines}


def print_results(comparison: Comparison, console: Console) -> None:
    """Prints a table for each call and direction; then a legend and the notes."""
    headers = ("", "ms", "", "x naive", "x SDPA", "MiB", "limit", "error")
    for block in blocks(comparison):
        table = empty_table(block.title, headers, text=("",))
        for line in block.lines:
            row = line.row
            table.add_row(
                line.variant.label,
                milliseconds(row.median_ms),
                f"±{line.spread:.0%}",
                factor(line.over_naive),
                factor(line.over_sdpa),
                UNKNOWN if row.peak_mib is None else f"{row.peak_mib:.0f}",
                f"{line.share:.0%} {line.binding[0].upper()}",
                f"{row.error:.0e}",
                style=None if line.variant.is_peer else "bold",
            )
        console.print(table)
    for dtype, limits in comparison.limits.items():
        console.print(f"limits in {dtype}: {limits.tflops:.3g} TFLOP/s, {limits.gbytes_s:.3g} GB/s")
    console.print(LEGEND)
    for title, texts in notes(comparison).items():
        console.print(f"\n{title}:")
        for text in texts:
            console.print(f"  {text}", markup=False, soft_wrap=True)


def print_changes(before: Sequence[Measured], after: Sequence[Measured], console: Console) -> None:
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


def write_page(comparison: Comparison, path: Path) -> None:
    """Writes bars for time, speed-up, memory, share of the limit and error, and all figures.

    Raises:
        OSError: the file cannot be written.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("page.html.jinja").render(
        run=comparison,
        notes=notes(comparison),
        blocks=list(blocks(comparison)),
        charts=charts,
        milliseconds=milliseconds,
        factor=factor,
    )
    path.write_text(text, encoding="utf-8")


class Bar(NamedTuple):
    """One variant in a chart."""

    variant: Variant
    colour: str
    length: float
    """0 to 1"""
    text: str


def charts(block: Block) -> Iterator[tuple[str, list[Bar]]]:
    """Yields the titles and bars of the charts of a call; those without any value are left out."""
    for title, value, text, length in _CHARTS:
        known = [(line.variant, x) for line in block.lines if (x := value(line)) is not None]
        largest = max((x for _, x in known), default=0.0)
        if known:
            yield (
                title,
                [
                    Bar(variant, COLOURS[variant.name], min(length(x, largest), 1.0), text(x))
                    for variant, x in known
                ],
            )


def _relative(value: float, largest: float) -> float:
    return value / (largest or 1.0)


def _logarithmic(error: float, _largest: float) -> float:
    return 1.0 - math.log10(max(error, _EXACT)) / math.log10(_EXACT)


def factor(value: float | None) -> str:
    """Formats with three significant digits."""
    if value is None:
        return UNKNOWN
    return f"{value:.2f}" if value < 10 else f"{value:.3g}" if value < 100 else f"{value:.0f}"


_Value = Callable[[Line], float | None]
_CHARTS: tuple[tuple[str, _Value, Callable[[float], str], Callable[[float, float], float]], ...] = (
    ("time, ms", lambda line: line.row.median_ms, milliseconds, _relative),
    ("times as fast as torch's SDPA", lambda line: line.over_sdpa, factor, _relative),
    ("times as fast as naive", lambda line: line.over_naive, factor, _relative),
    ("memory, MiB", lambda line: line.row.peak_mib, "{:.1f}".format, _relative),
    ("share of the machine's limit", lambda line: line.share, "{:.0%}".format, lambda x, _: x),
    ("error, logarithmic", lambda line: line.row.error, "{:.0e}".format, _logarithmic),
)
"""Title, value of a line, its text, and the length of its bar, beside the largest value."""
