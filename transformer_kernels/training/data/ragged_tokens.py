"""Rows of tokens of different lengths, concatenated in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RaggedTokens:
    """R rows of non-negative integers of different lengths."""

    values: Tensor
    """(sum of lengths,): the concatenated rows, in the narrowest of uint8, int16 and int32"""
    starts: Tensor
    """(R + 1,) int64: row r is values[starts[r] : starts[r + 1]]"""

    @staticmethod
    def of(rows: Sequence[Tensor]) -> RaggedTokens:
        """Concatenates rows, each (length,) int64 and non-negative."""
        lengths = torch.tensor([0, *(len(row) for row in rows)])
        values = torch.cat([torch.empty(0, dtype=torch.int64), *rows])
        largest = int(values.max()) if len(values) else 0
        return RaggedTokens(values.to(_narrow(largest)), lengths.cumsum(0))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> Tensor:
        """Row `row`, (length,) int64."""
        return self.values[self.starts[row] : self.starts[row + 1]].long()

    def padded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Gathers rows into a padded batch.

        Args:
            rows: (B,) int64, row indices.

        Returns:
            the rows, (B, longest) int64 with trailing zeros, and their lengths, (B,) int64.
        """
        starts = self.starts[rows]
        lengths = self.starts[rows + 1] - starts
        positions = torch.arange(int(lengths.max()) if len(rows) else 0)
        valid = positions < lengths[:, None]
        indices = (starts[:, None] + positions).where(valid, 0)
        return self.values[indices].long().where(valid, 0), lengths


def _narrow(largest: int) -> torch.dtype:
    for dtype in (torch.uint8, torch.int16):
        if largest <= torch.iinfo(dtype).max:
            return dtype
    return torch.int32
