"""Packed sequences in the references: each sequence alone, or all at once where lengths cannot be
read."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..problem.fields import table


def by_sequence(x: Any, dense: Callable[[Any], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Returns o, zero after the last sequence, and the final states of packed sequences.

    `dense` returns o and the final states of a call without cu_seqlens.
    """
    kind: Any = type(x)
    rows, states = _places(kind)
    starts = x.cu_seqlens.tolist()

    def sequence(b: int, first: int, end: int) -> tuple[Tensor, ...]:
        given = [(name, t) for name, t in x._asdict().items() if t is not None]
        own = {name: t[:, :, first:end] for name, t in given if name in rows}
        own |= {name: t[b : b + 1] for name, t in given if name in states}
        return dense(x._replace(cu_seqlens=None, **own))

    parts = [sequence(b, *ends) for b, ends in enumerate(pairwise(starts))]
    outputs, *ends = zip(*parts or [sequence(0, 0, 0)], strict=True)
    o = outputs[0]
    padding = o.new_zeros(1, o.shape[1], x[0].shape[2] - starts[-1], *o.shape[3:])
    final = (torch.cat(end)[: len(starts) - 1] for end in ends)
    return torch.cat([*outputs[: len(parts)], padding], dim=2), *final


def inside(x: Any) -> Tensor:
    """Returns which rows belong to which sequence: bool (B, 1, rows, 1)."""
    starts, ends = (cu_seqlens[:, None] for cu_seqlens in (x.cu_seqlens[:-1], x.cu_seqlens[1:]))
    row = torch.arange(x[0].shape[2], device=x[0].device)
    rows: Tensor = (row >= starts) & (row < ends)
    return rows[:, None, :, None]


@cache
def _places(inputs: Any) -> tuple[set[str], set[str]]:
    """Names of the tensors of all rows, and of those of sequences."""
    shapes = {field.name: field.shape for field in table(inputs)}
    rows = {name for name, shape in shapes.items() if shape.startswith("(entries,")}
    return rows, {name for name, shape in shapes.items() if shape.startswith("(B,")}
