"""Datasets that are read in order: lanes of a text, side by side in each batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

from torch import Tensor

from ...nn.options import check_positive
from .corpus import ByteWindows
from .dataset import Batch, Dataset, digest_of
from .windows import lane_length, lane_windows


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
class ByteLanes(ByteWindows):
    """Dataset of windows of a corpus that is also read in lanes: {"tokens": (B, context + 1)}.

    Lanes are equal parts of the text. The last byte of a segment, a target only, is the first input
    of the next one. The bytes at the end that do not fill a segment are left out.
    """

    @cached_property
    def digest(self) -> str:
        return digest_of("byte lanes", self.corpus.digest, self.context)

    def segments(self, lanes: int) -> int:
        check_positive("lanes", lanes)
        count = self._segments(self.corpus.train, lanes)
        if count == 0:
            raise ValueError(
                f"{self.name} is too short: {lanes} lanes with a context of {self.context} need "
                f"{lanes * self.context + 1} bytes in the training part, which has "
                f"{len(self.corpus.train)}"
            )
        return count

    def segment(self, number: int, lanes: int) -> Batch:
        return self._segment(self.corpus.train, number, lanes)

    def held_out_segments(self, lanes: int) -> Iterator[Batch]:
        check_positive("lanes", lanes)
        text = self.corpus.validation
        lanes = min(lanes, (len(text) - 1) // self.context)
        return (self._segment(text, n, lanes) for n in range(self._segments(text, lanes)))

    def _segments(self, text: Tensor, lanes: int) -> int:
        return lane_length(text, lanes) // self.context

    def _segment(self, text: Tensor, number: int, lanes: int) -> Batch:
        start = number * self.context
        return {"tokens": lane_windows(text, lanes=lanes, start=start, size=self.context + 1)}
