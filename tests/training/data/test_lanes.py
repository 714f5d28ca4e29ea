"""Tests of datasets that are read in lanes."""

from __future__ import annotations

import pytest
import torch

from transformer_kernels.training import (
    ByteLanes,
    ByteWindows,
    Corpus,
    LaneDataset,
    corpus_from_bytes,
)

CONTEXT = 7


@pytest.fixture
def corpus() -> Corpus:
    """A byte equals its index: 180 for training, 20 held out."""
    return corpus_from_bytes(bytes(range(200)), "counting")


@pytest.fixture
def data(corpus: Corpus) -> ByteLanes:
    return ByteLanes(corpus, CONTEXT)


def test_segments_of_a_lane_are_consecutive(data: ByteLanes) -> None:
    """Lanes of (180 - 1) // 3 = 59 bytes, of which eight segments of seven are read."""
    assert data.segments(3) == 8
    tokens = [data.segment(n, 3)["tokens"] for n in range(8)]
    assert {x.dtype for x in tokens} == {torch.int64}
    assert tokens[0].tolist() == [list(range(start, start + 8)) for start in (0, 59, 118)]
    lanes = torch.cat([x[:, :-1] for x in tokens], dim=1)
    assert lanes.tolist() == [list(range(start, start + 56)) for start in (0, 59, 118)]
    targets = torch.cat([x[:, 1:] for x in tokens], dim=1)
    assert torch.equal(targets, lanes + 1)


def test_last_target_may_be_the_first_byte_of_the_next_lane(corpus: Corpus) -> None:
    data = ByteLanes(corpus, 19)
    assert data.segments(9) == 1
    assert data.segment(0, 9)["tokens"][:, -1].tolist() == list(range(19, 180, 19))


def test_held_out_lanes_are_of_the_held_out_part(data: ByteLanes) -> None:
    (only,) = data.held_out_segments(2)
    assert only["tokens"].tolist() == [list(range(180, 188)), list(range(189, 197))]
    first, second = data.held_out_segments(1)
    assert first["tokens"].tolist() == [list(range(180, 188))]
    assert second["tokens"].tolist() == [list(range(187, 195))]


def test_held_out_part_has_fewer_lanes_if_it_is_short(data: ByteLanes) -> None:
    (only,) = data.held_out_segments(50)
    assert len(only["tokens"]) == 2


def test_windows_are_those_of_byte_windows(data: ByteLanes, corpus: Corpus) -> None:
    windows = ByteWindows(corpus, CONTEXT)
    generators = [torch.Generator().manual_seed(2) for _ in range(2)]
    drawn = [one.draw(4, g)["tokens"] for one, g in zip((data, windows), generators, strict=True)]
    assert torch.equal(*drawn)
    assert torch.equal(data.held_out(3)["tokens"], windows.held_out(3)["tokens"])
    assert data.digest != windows.digest
    assert isinstance(data, LaneDataset)
    assert not isinstance(windows, LaneDataset)


def test_text_too_short_for_its_lanes_is_refused(data: ByteLanes) -> None:
    assert data.segments(25) == 1
    with pytest.raises(ValueError, match="too short: 26 lanes with a context of 7 need 183 bytes"):
        data.segments(26)
    with pytest.raises(ValueError, match="lanes must be a whole number of at least 1, got 0"):
        data.segments(0)
    with pytest.raises(ValueError, match="lanes must be a whole number of at least 1, got 0"):
        data.held_out_segments(0)
