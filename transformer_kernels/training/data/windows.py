"""Windows of a long sequence: random, evenly spaced or in lanes."""

from __future__ import annotations

import torch
from torch import Tensor

from .dataset import evenly_spaced


def draw_windows(sequence: Tensor, *, count: int, size: int, generator: torch.Generator) -> Tensor:
    """Random windows of a sequence (length,) of integers: (count, size) int64."""
    starts = torch.randint(len(sequence) - size + 1, (count,), generator=generator)
    return _windows(sequence, starts, size)


def even_windows(sequence: Tensor, *, count: int, size: int) -> Tensor:
    """Evenly spaced windows over the whole sequence: (up to count, size) int64."""
    return _windows(sequence, evenly_spaced(len(sequence) - size + 1, count), size)


def lane_length(sequence: Tensor, lanes: int) -> int:
    """Length of a lane, without the element after it: lanes are equal parts of a sequence."""
    return (len(sequence) - 1) // lanes


def lane_windows(sequence: Tensor, *, lanes: int, start: int, size: int) -> Tensor:
    """The window at `start` in each lane: (lanes, size) int64. It may end one element after it."""
    starts = torch.arange(lanes) * lane_length(sequence, lanes) + start
    return _windows(sequence, starts, size)


def _windows(sequence: Tensor, starts: Tensor, size: int) -> Tensor:
    return sequence.unfold(0, size, 1)[starts].long()
