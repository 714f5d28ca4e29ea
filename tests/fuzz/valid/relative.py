"""Relative biases of valid calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz.call import PlainValues
from transformer_kernels.masks.constraints import Align
from transformer_kernels.scores.relative import RelativeBias


@dataclass(frozen=True, kw_only=True, repr=False)
class Relative(PlainValues):
    """A table of `entries` distances from `lowest` on."""

    entries: int = 1
    lowest: int = 0
    align: Align = "top_left"
    shared: bool = False
    """True for one table of all heads"""

    def table(self, normal: Callable[..., Tensor], H_q: int) -> Tensor:
        return normal("table", 1 if self.shared else H_q, self.entries)

    def bias(self, table: Tensor) -> RelativeBias:
        return RelativeBias(table, self.lowest, self.align)


def relative(draw: st.DrawFn, longest: int, align: Align | None = None) -> Relative:
    """A relative bias of up to `longest` positions, with this align or any."""
    aligns: tuple[Align, ...] = ("top_left", "bottom_right") if align is None else (align,)
    return Relative(
        entries=draw(st.sampled_from([1, 2, 9, longest, 2 * longest + 1])),
        lowest=draw(st.sampled_from([0, -1, 3, -longest, longest + 5, -2 * longest - 9])),
        align=draw(st.sampled_from(aligns)),
        shared=draw(st.booleans()),
    )
