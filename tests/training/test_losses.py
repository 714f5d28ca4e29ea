"""Losses, and evaluation on held-out data."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.support.recurrent import RecentBytes, RecentBytesConfig, RecentBytesTask
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
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
from transformer_kernels.training.task import cross_entropy_sum, smoothed_cross_entropy

V, PAD = 11, 3
TARGETS = torch.tensor([[0, 10, 3, 4], [5, 3, 3, 3], [1, 2, 9, 0]])
COUNT = 8


def logits() -> Tensor:
    draws = torch.Generator().manual_seed(0)
    return (3.0 * torch.randn(3, 4, V, generator=draws).double()).requires_grad_()


def distribution(smoothing: float) -> Tensor:
    """Explicit smoothed distribution, (3, 4, V); 0 where the target is padding."""
    q = torch.full((3, 4, V), smoothing / (V - 2), dtype=torch.float64)
    q.scatter_(-1, TARGETS[..., None], 1.0 - smoothing)
    q[..., PAD] = 0.0
    return q.masked_fill((TARGETS == PAD)[..., None], 0.0)


def loss(logits: Tensor, targets: Tensor = TARGETS, smoothing: float = 0.1) -> Tensor:
    total, _ = smoothed_cross_entropy(logits, targets, smoothing=smoothing, pad=PAD)
    return total


@each("smoothing", [0.0, 0.1, 0.9])
def test_smoothed_loss_is_the_cross_entropy_with_the_smoothed_distribution(
    smoothing: float,
) -> None:
    z = logits()
    total, count = smoothed_cross_entropy(z, TARGETS, smoothing=smoothing, pad=PAD)
    expected = -(distribution(smoothing) * z.log_softmax(dim=-1)).sum()
    assert (count.item(), count.dtype, total.dim()) == (COUNT, torch.int64, 0)
    assert_same_function(total, expected)
    assert_same_function(torch.autograd.grad(total, z), torch.autograd.grad(expected, z))


def test_without_smoothing_a_logit_may_be_infinite() -> None:
    hidden = logits().detach()
    hidden[..., 6] = -math.inf
    assert loss(hidden, smoothing=0.0).isfinite()


def test_padding_is_ignored() -> None:
    z = logits()
    (dz,) = torch.autograd.grad(loss(z), z)
    assert (dz[TARGETS == PAD] == 0).all()
    assert (dz[TARGETS != PAD] != 0).all()
    other = z.detach().clone()
    other[TARGETS == PAD] = 100.0
    assert torch.equal(loss(other), loss(z))


def test_all_padding_gives_a_loss_of_zero() -> None:
    z = logits()
    total, count = smoothed_cross_entropy(z, torch.full((3, 4), PAD), smoothing=0.1, pad=PAD)
    assert (total.item(), count.item()) == (0.0, 0)
    assert not torch.autograd.grad(total, z)[0].any()
    empty = smoothed_cross_entropy(z[:0], TARGETS[:0], smoothing=0.1, pad=PAD)
    assert [x.item() for x in empty] == [0.0, 0]


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    """Each sum is divided by the number of targets of the whole batch."""
    z = logits()
    parts = [
        smoothed_cross_entropy(z[b], TARGETS[b], smoothing=0.1, pad=PAD) for b in range(len(z))
    ]
    count = sum(part.item() for _, part in parts)
    accumulated = sum(torch.autograd.grad(total / count, z)[0] for total, _ in parts)
    assert_same_function(accumulated, torch.autograd.grad(loss(z) / COUNT, z)[0])


def test_scalar_target_is_accepted() -> None:
    z = logits()
    one = smoothed_cross_entropy(z[0, 0], TARGETS[0, 0], smoothing=0.1, pad=PAD)
    assert_same_function(one[0], loss(z[:1, :1], TARGETS[:1, :1]))
    assert one[1] == 1


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_computed_and_summed_in_float32(
    dtype: torch.dtype, autocast: bool
) -> None:
    """4000 targets with logits far from 0: neither the sum nor the offset loses precision."""
    draws = torch.Generator().manual_seed(0)
    z = (torch.randn(4000, V, generator=draws) + 300.0).to(dtype).requires_grad_()
    targets = torch.randint(V, (4000,), generator=draws)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        total = loss(z, targets)
    expected = loss(z.double(), targets)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    (dz,) = torch.autograd.grad(total, z)
    assert dz.dtype == dtype
    torch.testing.assert_close(
        dz.double(), torch.autograd.grad(expected, z)[0].double(), rtol=1e-2, atol=1e-4
    )


def test_one_number_per_logit_is_saved_for_backward() -> None:
    """The smoothed distribution is not materialised."""
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    z = torch.randn(50, 1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        total = loss(z, torch.full((50,), 7))
    assert sum(saved.values()) == 4 * z.numel()
    assert total.requires_grad


@each(
    ("z", "targets", "options", "error", "message"),
    [
        (torch.zeros(2, 5), [0, 1], {"smoothing": 1.0}, ValueError,
         "smoothing must be at least 0 and below 1, got 1.0"),
        (torch.zeros(2, 5), [0, 1], {"smoothing": -0.1}, ValueError,
         "smoothing must be at least 0 and below 1, got -0.1"),
        (torch.zeros(2, 5, dtype=torch.int64), [0, 1], {}, TypeError,
         "logits must be of a floating dtype, got torch.int64"),
        (torch.zeros(2, 5), [0.0, 1.0], {}, TypeError, "targets must be int64, got torch.float32"),
        (torch.zeros(2, 5), [0, 1, 2], {}, ValueError,
         "logits must be (..., V) and targets (...), got shapes (2, 5) and (3,)"),
        (torch.tensor(0.0), 1, {}, ValueError,
         "logits must be (..., V) and targets (...), got shapes () and ()"),
        (torch.zeros(2, 2), [0, 1], {}, ValueError,
         "logits must have at least 3 tokens to smooth over, got 2"),
        (torch.zeros(2, 5), [0, 1], {"pad": 5}, ValueError,
         "pad must be a token from 0 to 4, got 5"),
        (torch.zeros(2, 5), [0, 1], {"pad": -100}, ValueError,
         "pad must be a token from 0 to 4, got -100"),
        (torch.zeros(2, 5), [0, 5], {}, ValueError, "targets must be tokens from 0 to 4, got 5"),
        (torch.zeros(2, 5), [-1, 5], {}, ValueError, "targets must be tokens from 0 to 4, got -1"),
    ],
)  # fmt: skip
def test_invalid_argument_is_named(
    z: Tensor,
    targets: list[float] | float,
    options: dict[str, float],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        smoothed_cross_entropy(z, torch.tensor(targets), **({"smoothing": 0.1, "pad": 0} | options))  # type: ignore[arg-type]


@each("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_cross_entropy_sum_skips_ignored_targets(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 5, 7).to(dtype)
    targets = torch.randint(7, (3, 5))
    targets[0, 1] = targets[2] = -100
    log_p = logits.double().log_softmax(dim=-1)
    rows = (targets != -100).nonzero().tolist()
    expected = -sum(float(log_p[b, t, targets[b, t]]) for b, t in rows)
    loss = cross_entropy_sum(logits, targets)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


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
