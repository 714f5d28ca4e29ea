"""Windows of a long sequence: at random, or spread evenly."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.training.data.dataset import evenly


def draw_windows(sequence: Tensor, *, count: int, size: int, generator: torch.Generator) -> Tensor:
    """`count` windows at random of a sequence (length,) of integers: (count, size) int64."""
    starts = torch.randint(len(sequence) - size + 1, (count,), generator=generator)
    return _windows(sequence, starts, size)


def even_windows(sequence: Tensor, *, count: int, size: int) -> Tensor:
    """Up to `count` windows spread evenly from end to end, the same at every call."""
    return _windows(sequence, evenly(len(sequence) - size + 1, count), size)


def _windows(sequence: Tensor, starts: Tensor, size: int) -> Tensor:
    return sequence.unfold(0, size, 1)[starts].long()
