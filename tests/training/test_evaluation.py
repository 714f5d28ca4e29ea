"""Tests of the evaluation of language models on held-out lanes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.support.recurrent import RecentBytes, RecentBytesConfig, RecentBytesTask
from transformer_kernels.models import GeneratorConfig
from transformer_kernels.training import (
    PRESETS,
    ByteLanes,
    Corpus,
    GeneratorTask,
    State,
    evaluate,
    evaluate_examples,
)
from transformer_kernels.training.data import Copies

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


@pytest.mark.parametrize("batch", [3, 100])
def test_examples_are_scored_as_one_batch(batch: int) -> None:
    task = PRESETS["reformer-copy"]["demo"].task
    config = replace(task.model, width=16, context=12, vocabulary=12, chunk=12)
    task, data = replace(task, model=config), Copies(12, 12)
    torch.manual_seed(4)
    model = task.build("fused").train()
    result = evaluate_examples(task, model, data, count=7, batch=batch)
    assert model.training
    model.eval()
    whole = data.held_out(7)
    assert result.tokens == 7 * 5
    assert result.loss == pytest.approx(task.losses(model, whole)["copied symbol"].item() / 35)
    assert result.score == task.score(model, data, [whole], 0.0)
    for options in ({"count": 0}, {"count": 7, "batch": 0}):
        with pytest.raises(ValueError, match="must be a whole number of at least 1, got 0"):
            evaluate_examples(task, model, data, **options)


def test_score_of_a_copy_is_the_share_of_right_symbols() -> None:
    task, data = PRESETS["reformer-copy"]["demo"].task, Copies(12, 12)
    tokens = data.held_out(4)["tokens"]

    class Copier(nn.Module):
        """Predicts the symbol of half a text before, wrongly at the fourth symbol of a word."""

        def forward(self, text: Tensor) -> Tensor:
            assert text.shape == (4, 11)
            right = text.roll(5, dims=1)
            right[:, 9] += 1
            return nn.functional.one_hot(right, 14).double() * 100.0

    assert task.score(Copier(), data, [{"tokens": tokens}], 0.0) == 0.8
    assert task.losses(Copier(), {"tokens": tokens})["copied symbol"].item() == pytest.approx(400.0)
    assert task.counts({"tokens": tokens}) == {"copied symbol": 20}
