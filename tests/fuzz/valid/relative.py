"""Relative biases and keys of valid calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz.call import PlainValues
from transformer_kernels.masks.constraints import Align
from transformer_kernels.scores.relative import Relative as Distances
from transformer_kernels.scores.relative import RelativeBias, RelativeKeys

Kind = Literal["table", "keys", "both"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Relative(PlainValues):
    """A table of `entries` distances from `lowest` on, keys or both."""

    entries: int = 1
    lowest: int = 0
    align: Align = "top_left"
    shared: bool = False
    """True for one table of all heads"""
    kind: Kind = "table"

    @property
    def names(self) -> tuple[Literal["table", "keys"], ...]:
        """Names of its tensors."""
        return ("table", "keys") if self.kind == "both" else (self.kind,)

    def tensors(self, normal: Callable[..., Tensor], H_q: int, D: int) -> dict[str, Tensor]:
        shape = (1 if self.shared else H_q, self.entries)
        return {name: normal(name, *shape, *(D,) * (name == "keys")) for name in self.names}

    def of(self, x: Mapping[str, Tensor]) -> Distances:
        """The argument `relative` with the tensors of `x`."""
        if self.kind == "table":
            return RelativeBias(x["table"], self.lowest, self.align)
        return RelativeKeys(x["keys"], x.get("table"), self.lowest, self.align)


def relative(
    draw: st.DrawFn,
    longest: int,
    align: Align | None = None,
    kinds: tuple[Kind, ...] = ("table", "keys", "both"),
) -> Relative:
    """A relative bias or keys of up to `longest` positions, with this align or any."""
    aligns: tuple[Align, ...] = ("top_left", "bottom_right") if align is None else (align,)
    return Relative(
        entries=draw(st.sampled_from([1, 2, 9, max(longest, 1), 2 * longest + 1])),
        lowest=draw(st.sampled_from([0, -1, 3, -longest, longest + 5, -2 * longest - 9])),
        align=draw(st.sampled_from(aligns)),
        shared=draw(st.booleans()),
        kind=draw(st.sampled_from(kinds)),
    )
