"""Interface of the datasets, and helpers to implement it."""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import Tensor

Batch = dict[str, Tensor]
"""Tensors by name; dimension 0 is the batch dimension. Tensors are int64 on the CPU unless noted.

Rows of different lengths have trailing padding, zeros unless noted, up to the longest of the batch.
A tensor named "lengths" or "*_lengths" holds the length of each row without padding.
"""


class Dataset(Protocol):
    """Training examples and held-out examples."""

    @property
    def name(self) -> str:
        """Display name."""

    @property
    def source(self) -> str | None:
        """Absolute path of its files, or None."""

    @property
    def digest(self) -> str:
        """SHA-256 of everything that its batches depend on, in hexadecimal."""

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """Draws `count` random training examples, determined by the generator's state."""

    def held_out(self, count: int) -> Batch:
        """Up to `count` held-out examples, evenly spaced, the same at every call.

        `draw` never returns them.
        """


def digest_of(*parts: bytes | str | int) -> str:
    """SHA-256 of a sequence of values, in hexadecimal; ("ab", "c") differs from ("a", "bc")."""
    whole = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode()
        whole.update(f"{type(part).__name__} {len(content)} ".encode())
        whole.update(content)
    return whole.hexdigest()


def evenly_spaced(total: int, count: int) -> Tensor:
    """Evenly spaced distinct indices below `total`, including the first.

    Returns:
        (min(count, total),) int64; the last index is included if there are at least two.
    """
    return torch.linspace(0, total - 1, min(count, total), dtype=torch.float64).long()
