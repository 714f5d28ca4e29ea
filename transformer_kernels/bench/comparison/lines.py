"""Results by call and direction, as the table and the page show them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..cases import Direction
from ..limits import Limits
from ..pictures import TITLES
from ..rows import Row
from ..variants import VARIANTS, Variant
from .run import Call, CallResult, Comparison


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

    call: Call
    direction: Direction
    lines: list[Line]
    result: CallResult

    @property
    def title(self) -> str:
        name = f"{self.call.name}: " if self.call.name else ""
        return f"{name}{self.call}, {TITLES[self.direction]}"

    @property
    def loss(self) -> float | None:
        """Time of the fastest variant of ours over that of the fastest peer, if it is above 1."""
        ours = [line.row.median_ms for line in self.lines if not line.variant.is_peer]
        peers = [line.row.median_ms for line in self.lines if line.variant.is_peer]
        if not ours or not peers or min(ours) <= min(peers):
            return None
        return min(ours) / min(peers)

    @property
    def fastest_peer(self) -> Variant:
        peers = [line for line in self.lines if line.variant.is_peer]
        return min(peers, key=lambda line: line.row.median_ms).variant


def blocks(comparison: Comparison) -> Iterator[Block]:
    """Yields the results in the order of the calls."""
    for call, result in comparison.results:
        for direction in call.directions:
            rows = [one.row for one in result.measured if one.row.direction == direction]
            if rows:
                limits = comparison.limits[rows[0].dtype]
                yield Block(call, direction, list(_lines(rows, limits)), result)


def _lines(rows: list[Row], limits: Limits) -> Iterator[Line]:
    times = {row.variant: row.median_ms for row in rows}

    def over(peer: str, row: Row) -> float | None:
        return times[peer] / row.median_ms if peer in times else None

    for row in rows:
        yield Line(
            variant=VARIANTS[row.variant],
            row=row,
            share=limits.share(row),
            binding=limits.binding(row),
            over_naive=over("naive", row),
            over_sdpa=over("sdpa", row),
        )


def losses(comparison: Comparison) -> list[str]:
    """Returns a line for each call where a peer is faster than all variants of ours."""
    return [
        f"{block.title}: {block.fastest_peer.label} is {block.loss:.2f} times as fast"
        for block in blocks(comparison)
        if block.loss is not None
    ]


def omissions(comparison: Comparison) -> list[str]:
    """Returns a line for everything that was not measured, or not at its own length."""
    lines = []
    for call, result in comparison.results:
        for name, reason in result.broken.items():
            lines.append(f"{call}: {VARIANTS[name].label} FAILED: {reason}")
        for name, reason in result.skipped.items():
            lines.append(f"{call}: {VARIANTS[name].label} is not measured: {reason}")
        if result.checked_tokens != call.shape.N:
            lines.append(f"{call}: errors are those with {result.checked_tokens} keys")
    return lines


def disturbances(comparison: Comparison) -> list[str]:
    """Returns a line for each call during which the machine was disturbed, in every try."""
    return [
        f"{one.item}: the machine was up to {one.slower:.0%} slower than usual"
        for one in comparison.calls.disturbed
    ]
