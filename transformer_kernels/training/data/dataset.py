"""What a trainer asks of a dataset."""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import Tensor

Batch = dict[str, Tensor]
"""The first dimension of every tensor counts examples. All are int64 on the CPU unless said.

Rows of different lengths are padded behind, with zeros unless said, to the longest of the batch; a
tensor called "lengths", or whose name ends so, says how much of each row is there.
"""


class Dataset(Protocol):
    """Examples to train on, and others that are held out."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def source(self) -> str | None:
        """The absolute path of the files it came from, if it did."""

    @property
    def digest(self) -> str:
        """SHA-256 of everything that decides its batches, in hexadecimal."""

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """`count` examples to train on, at random: the generator's state decides which."""

    def held_out(self, count: int) -> Batch:
        """Up to `count` examples that `draw` never gives, spread evenly over all such: the same at
        every call."""


def digest_of(*parts: bytes | str | int) -> str:
    """SHA-256, in hexadecimal, of these values in this order; ("ab", "c") is not ("a", "bc")."""
    whole = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode()
        whole.update(f"{type(part).__name__} {len(content)} ".encode())
        whole.update(content)
    return whole.hexdigest()


def evenly(total: int, count: int) -> Tensor:
    """Up to `count` of the numbers below `total`, from the first to the last, evenly spread.

    (min(count, total),) int64, each once.
    """
    return torch.linspace(0, total - 1, min(count, total), dtype=torch.float64).long()
