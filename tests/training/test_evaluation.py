"""Tests of the evaluation of language models on held-out lanes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.support.recurrent import RecentBytes, RecentBytesConfig, RecentBytesTask
from transformer_kernels.models import GeneratorConfig
from transformer_kernels.training import ByteLanes, Corpus, GeneratorTask, State, evaluate

TASK = RecentBytesTask(model=RecentBytesConfig(context=12, memory=30, dropout=0.5))


@pytest.fixture
def lanes(corpus: Corpus) -> ByteLanes:
    return ByteLanes(corpus, 12)


@pytest.fixture
def model() -> RecentBytes:
    torch.manual_seed(4)
    return TASK.build("fused")


@pytest.mark.parametrize("segments", [None, 2])
def test_state_is_carried_along_the_lanes(
    lanes: ByteLanes, model: RecentBytes, segments: int | None
) -> None:
    batches = list(lanes.held_out_segments(3))[:segments]
    assert len(batches) == (4 if segments is None else 2)
    model.eval()
    total = 0.0
    state: State = ()
    for batch in batches:
        sums, state = TASK.carry(model, batch, state)
        total += sums["next byte"].item()
    tokens = len(batches) * 3 * 12
    result = evaluate(TASK, model, lanes, lanes=3, segments=segments)
    assert result.tokens == tokens
    assert result.loss == pytest.approx(total / tokens, rel=1e-9)
    assert result.score == pytest.approx(total / tokens / math.log(2), rel=1e-9)
    other = RecentBytes(replace(TASK.model, memory=3))
    other.load_state_dict(model.state_dict())
    assert evaluate(TASK, other, lanes, lanes=3, segments=segments).loss != result.loss


def test_evaluation_draws_nothing_and_restores_the_training_mode(
    lanes: ByteLanes, model: RecentBytes
) -> None:
    before = torch.get_rng_state()
    model.train()
    assert evaluate(TASK, model, lanes, lanes=2) == evaluate(TASK, model, lanes, lanes=2)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    model.eval()
    evaluate(TASK, model, lanes, lanes=2)
    assert not model.training


def test_model_without_a_state_reads_each_segment_alone(lanes: ByteLanes) -> None:
    task = GeneratorTask(model=GeneratorConfig(layers=1, width=8, heads=2, context=12))
    model = task.build("fused")
    tokens = torch.cat([batch["tokens"] for batch in lanes.held_out_segments(2)])
    whole = task.losses(model, {"tokens": tokens})["next byte"].item() / task.tokens(
        {"tokens": tokens}
    )
    assert evaluate(task, model, lanes, lanes=2).loss == pytest.approx(whole, rel=1e-6)
