"""The results as one HTML file: bars for time, speed-up, memory, share of the limit and error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..pictures import COLOURS
from ..tables import milliseconds
from .lines import Block, Line, blocks, disturbances, losses, omissions
from .run import Comparison
from .table import factor

TEMPLATE = "page.html.jinja"
_EXACT = 1e-17
"""Error at which a bar of the error chart has no length; its scale is logarithmic."""


@dataclass(frozen=True)
class Bar:
    """One variant in a chart."""

    label: str
    ours: bool
    colour: str
    length: float
    """0 to 1"""
    value: str


@dataclass(frozen=True)
class Chart:
    """One figure of a call, by variant."""

    title: str
    bars: list[Bar]

    @property
    def description(self) -> str:
        return ", ".join(f"{bar.label} {bar.value}" for bar in self.bars)


def write_page(comparison: Comparison, path: Path) -> None:
    """Writes the page.

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
    lost = losses(comparison)
    text = environment.get_template(TEMPLATE).render(
        run=comparison,
        losses=lost,
        notes=[
            ("Slower than a peer", lost),
            ("Not measured", omissions(comparison)),
            ("Disturbed", disturbances(comparison)),
        ],
        blocks=list(blocks(comparison)),
        charts=charts,
        milliseconds=milliseconds,
        factor=factor,
    )
    path.write_text(text, encoding="utf-8")


def charts(block: Block) -> Iterator[Chart]:
    """Yields the charts of a call; those without any value are left out."""
    for title, value, text in (
        ("time, ms", lambda x: x.row.median_ms, lambda x: milliseconds(x.row.median_ms)),
        ("times as fast as torch's SDPA", lambda x: x.over_sdpa, lambda x: factor(x.over_sdpa)),
        ("times as fast as naive", lambda x: x.over_naive, lambda x: factor(x.over_naive)),
        ("memory, MiB", lambda x: x.row.peak_mib, lambda x: f"{x.row.peak_mib:.1f}"),
    ):
        yield from _chart(title, block.lines, value, text)
    yield from _chart(
        "share of the machine's limit", block.lines, lambda x: x.share,
        lambda x: f"{x.share:.0%}", longest=1.0,
    )  # fmt: skip
    yield from _chart(
        "error, logarithmic", block.lines, lambda x: max(math.log10(x.row.error / _EXACT), 0.0)
        if x.row.error > 0.0 else 0.0, lambda x: f"{x.row.error:.0e}", longest=-math.log10(_EXACT),
    )  # fmt: skip


def _chart(
    title: str,
    lines: list[Line],
    value: Callable[[Line], float | None],
    text: Callable[[Line], str],
    *,
    longest: float | None = None,
) -> Iterator[Chart]:
    known = [(line, x) for line in lines if (x := value(line)) is not None]
    if not known:
        return
    scale = longest or max(x for _, x in known) or 1.0
    yield Chart(
        title,
        [
            Bar(
                line.variant.label,
                not line.variant.is_peer,
                COLOURS[line.variant.name],
                min(x / scale, 1.0),
                text(line),
            )
            for line, x in known
        ],
    )
