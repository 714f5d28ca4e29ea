"""Interfaces of the datasets, and helpers to implement them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

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


@runtime_checkable
class LaneDataset(Dataset, Protocol):
    """A dataset whose training and held-out parts are also cut into lanes of consecutive segments.

    Row n of a batch is a segment of lane n. The same row of the next batch continues it.
    """

    def segments(self, lanes: int) -> int:
        """Number of segments of a lane, if the training part has so many lanes.

        Raises:
            ValueError: the training part is too short for one segment in each lane.
        """

    def segment(self, number: int, lanes: int) -> Batch:
        """Segment `number` of every lane of the training part; `number` is below `segments`."""

    def held_out_segments(self, lanes: int) -> Iterator[Batch]:
        """Segments of the held-out part, in order.

        There are fewer lanes than `lanes` if the part is too short for a segment in each.
        """


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
        dtypes = (torch.uint8, torch.int16, torch.int32)
        narrow = next(dtype for dtype in dtypes if largest <= torch.iinfo(dtype).max)
        return RaggedTokens(values.to(narrow), lengths.cumsum(0))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> Tensor:
        """Row `row`, (length,) int64."""
        return self.values[self.starts[row] : self.starts[row + 1]].long()

    def padded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Gathers rows by their indices, (B,) int64.

        Returns the rows, (B, longest) int64 with trailing zeros, and their lengths, (B,) int64.
        """
        starts = self.starts[rows]
        lengths = self.starts[rows + 1] - starts
        positions = torch.arange(int(lengths.max()) if len(rows) else 0)
        valid = positions < lengths[:, None]
        indices = (starts[:, None] + positions).where(valid, 0)
        return self.values[indices].long().where(valid, 0), lengths


def pad_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Pads rows, each (length,) int64 and non-negative; see `RaggedTokens.padded`."""
    return RaggedTokens.of(rows).padded(torch.arange(len(rows)))


def digest_of(*parts: bytes | str | int) -> str:
    """SHA-256 of a sequence of values, in hexadecimal; ("ab", "c") differs from ("a", "bc")."""
    whole = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode()
        whole.update(f"{type(part).__name__} {len(content)} ".encode())
        whole.update(content)
    return whole.hexdigest()


def evenly_spaced(total: int, count: int) -> Tensor:
    """Evenly spaced distinct indices below `total`: (min(count, total),) int64.

    The first is included, and the last if there are at least two.
    """
    return torch.linspace(0, total - 1, min(count, total), dtype=torch.float64).long()


def read_lines(path: Path) -> list[str]:
    """Lines of a file, without their ends; ValueError names one that is not UTF-8."""
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1]:
        lines.pop()
    texts: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            texts.append(line.decode().removesuffix("\r"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}, is not UTF-8: {error.reason}") from None
    return texts
