"""Many rows of tokens, of different lengths, kept end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RaggedTokens:
    """R rows of integers."""

    values: Tensor
    """(sum of the lengths,): one row after another; uint8, int16 or int32, what is enough"""
    starts: Tensor
    """(R + 1,) int64: row r is values[starts[r] : starts[r + 1]]"""

    @staticmethod
    def of(rows: Sequence[Tensor]) -> RaggedTokens:
        """`rows`: (length,) int64 each, of numbers that are not negative."""
        lengths = torch.tensor([0, *(len(row) for row in rows)])
        values = torch.cat([torch.empty(0, dtype=torch.int64), *rows])
        largest = int(values.max()) if len(values) else 0
        return RaggedTokens(values.to(_narrow(largest)), lengths.cumsum(0))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> Tensor:
        """(length,) int64."""
        return self.values[self.starts[row] : self.starts[row + 1]].long()

    def padded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of these numbers (B,): (B, longest of them) int64, zeros behind; lengths (B,)
        int64."""
        starts = self.starts[rows]
        lengths = self.starts[rows + 1] - starts
        positions = torch.arange(int(lengths.max()) if len(rows) else 0)
        there = positions < lengths[:, None]
        places = (starts[:, None] + positions).where(there, 0)
        return self.values[places].long().where(there, 0), lengths


def _narrow(largest: int) -> torch.dtype:
    for dtype in (torch.uint8, torch.int16):
        if largest <= torch.iinfo(dtype).max:
            return dtype
    return torch.int32
