"""Tests of tasks with a state: each lane keeps its own, in training, validation and checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tests.support.recurrent import RecentBytesConfig, RecentBytesTask
from tests.training.run_helpers import (
    assert_same_weights,
    edit_config,
    edit_tensors,
    overflow_gradients,
    weights_of,
    with_dropout,
)
from transformer_kernels.models import GeneratorConfig, TransformerXLConfig
from transformer_kernels.training import (
    TASKS,
    ByteLanes,
    ByteWindows,
    Checkpoint,
    CheckpointError,
    Corpus,
    Dataset,
    GeneratorTask,
    Precision,
    Schedule,
    State,
    TrainConfig,
    Trainer,
    corpus_from_bytes,
)
from transformer_kernels.training.checkpoint import write_checkpoint
from transformer_kernels.training.distributed import DistributedContext
from transformer_kernels.training.tasks import TransformerXLTask

CONTEXT, MEMORY, LANES = 12, 30, 5
TASK = RecentBytesTask(model=RecentBytesConfig(context=CONTEXT, memory=MEMORY))


class Rank(DistributedContext):
    """One of several ranks, without the others: its own share of a batch and of its sums."""

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        return model

    def all_gather(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def all_reduce_sum(self, value: Tensor) -> float:
        return value.item()


@dataclass(frozen=True, kw_only=True)
class Gathered(DistributedContext):
    """A rank that gathers these values."""

    parts: list[Any]

    def all_gather(self, value: Any) -> list[Any]:
        return self.parts


@pytest.fixture(autouse=True)
def _known_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, TASK.kind, RecentBytesTask)


@pytest.fixture
def config() -> TrainConfig:
    return TrainConfig(
        task=TASK,
        steps=40,
        batch=LANES,
        accumulate=2,
        schedule=Schedule(peak=1e-2, warmup=2),
        eval_every=20,
        eval_batches=3,
    )


@pytest.fixture
def corpus() -> Corpus:
    """Bytes at random, so that any two places of the text differ."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(256, (1000,), generator=generator, dtype=torch.uint8)
    return corpus_from_bytes(bytes(text.tolist()), "noise")


@pytest.fixture
def data(corpus: Corpus) -> ByteLanes:
    return ByteLanes(corpus, CONTEXT)


def stepped(trainer: Trainer, steps: int) -> Trainer:
    for _ in range(steps):
        trainer.step()
    return trainer


def assert_resumes_exactly(trainer: Trainer, folder: Path, steps: int) -> Checkpoint:
    """The next steps from a checkpoint are those of the trainer. Returns the checkpoint."""
    checkpoint = Checkpoint.open(write_checkpoint(folder, *trainer.state(), ()))
    expected = [trainer.step() for _ in range(steps)]
    resumed = Trainer(trainer.config, trainer.data)
    resumed.restore(checkpoint)
    assert [resumed.step() for _ in range(steps)] == expected
    assert lists(resumed.states) == lists(trainer.states)
    assert_same_weights(resumed.model, trainer.model)
    return checkpoint


def lists(states: Sequence[State]) -> list[list[Any]]:
    return [[x.tolist() for x in state] for state in states]


def recent(corpus: Corpus, lanes: list[int], read: int) -> Tensor:
    """The last bytes of each lane after `read` bytes of it, by the definition of a lane."""
    text, size = corpus.train.float(), (len(corpus.train) - 1) // LANES
    rows = [text[n * size : n * size + read][-MEMORY:] for n in lanes]
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("rank", "world_size", "accumulate", "lanes"),
    [
        (0, 1, 1, [[0, 1, 2, 3, 4]]),
        (0, 1, 3, [[0, 1], [2, 3], [4]]),
        (0, 2, 2, [[0, 2], [4]]),
        (1, 2, 2, [[1], [3]]),
    ],
)
def test_each_micro_batch_of_each_rank_keeps_the_state_of_its_lanes(
    config: TrainConfig, data: ByteLanes, corpus: Corpus,
    rank: int, world_size: int, accumulate: int, lanes: list[list[int]],
) -> None:  # fmt: skip
    trainer = Trainer(replace(config, accumulate=accumulate), data, Rank(rank, world_size))
    assert trainer.states == [()] * accumulate
    for step in range(1, 6):
        trainer.step()
        assert len(trainer.states) == len(lanes)
        for (state,), mine in zip(trainer.states, lanes, strict=True):
            assert torch.equal(state, recent(corpus, mine, step * CONTEXT))


def test_lanes_start_again_with_an_empty_state(config: TrainConfig, data: ByteLanes) -> None:
    trainer, seen = Trainer(config, data), []

    def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs)

    trainer.model.register_forward_pre_hook(record)
    segments = data.segments(LANES)
    assert segments == (900 - 1) // LANES // CONTEXT
    for step in range(1, segments + 3):
        trainer.step()
        assert (trainer.states == [(), ()]) == (step == segments)
    passes = [seen[: 2 * segments], seen[2 * segments :]]
    assert [len(inputs) for inputs in passes[0]] == [1, 1] + [2] * (2 * segments - 2)
    for first, again in zip(passes[0], passes[1], strict=False):
        assert len(first) == len(again)
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("steps", [0, 1, 4, 14])
def test_resume_continues_exactly(
    config: TrainConfig, data: ByteLanes, tmp_path: Path, steps: int
) -> None:
    """With dropout, from the start, within the lanes and at their end."""
    trainer = Trainer(with_dropout(config, 0.3), data)
    assert_resumes_exactly(stepped(trainer, steps), tmp_path, 6)


def test_states_affect_the_losses(config: TrainConfig, data: ByteLanes) -> None:
    """Otherwise the test above would pass without them."""
    kept, lost = (stepped(Trainer(config, data), 1) for _ in range(2))
    lost.states = [(), ()]
    assert kept.step() != lost.step()


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_lanes_keep_their_states_on_any_number_of_processes(
    config: TrainConfig, data: ByteLanes, corpus: Corpus, tmp_path: Path, world_size: int
) -> None:
    """Saved by two of them, each with three or two of the five lanes."""
    ranks = [stepped(Trainer(config, data, Rank(rank, 2)), 2) for rank in range(2)]
    parts = [
        {f"states.{n}": torch.cat(x) for n, x in enumerate(zip(*trainer.states, strict=True))}
        for trainer in ranks
    ]
    metadata, tensors = ranks[0].state()
    tensors |= Gathered(0, 2, parts=parts).unshard(parts[0])
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, metadata, tensors, ()))
    config = replace(config, accumulate=1)
    for rank in range(world_size):
        again = Trainer(config, data, Rank(rank, world_size))
        again.restore(checkpoint)
        lanes = list(range(LANES))[rank::world_size]
        assert torch.equal(again.states[0][0], recent(corpus, lanes, 2 * CONTEXT))


def test_validation_reads_held_out_lanes_in_order(
    config: TrainConfig, data: ByteLanes, corpus: Corpus
) -> None:
    trainer = Trainer(config, data)
    text, size = corpus.validation, (100 - 1) // LANES
    tokens = torch.stack([text[n * size : n * size + CONTEXT + 1] for n in range(LANES)]).long()
    loss = TASK.losses(trainer.model, {"tokens": tokens})["next byte"].item()
    assert trainer.validate().loss == pytest.approx(loss / (LANES * CONTEXT), rel=1e-6)


def test_validation_carries_the_state(config: TrainConfig, data: ByteLanes) -> None:
    """Two lanes of four segments, of which three are read."""
    config = replace(config, batch=2, eval_batches=3)
    trainer = Trainer(config, data)
    state: State = ()
    total = 0.0
    batches = list(data.held_out_segments(2))
    assert len(batches) == 4
    for batch in batches[:3]:
        sums, state = TASK.carry(trainer.model, batch, state)
        total += sums["next byte"].item()
    assert trainer.validate().loss == pytest.approx(total / (3 * 2 * CONTEXT), rel=1e-6)


def test_validation_leaves_training_unchanged(config: TrainConfig, data: ByteLanes) -> None:
    config = with_dropout(config, 0.3)
    trainer, other = Trainer(config, data), Trainer(config, data)
    for one in (trainer, other):
        torch.manual_seed(7)
        one.step()
    states = copy.deepcopy(trainer.states)
    generators = torch.get_rng_state(), trainer.batches.get_state()
    assert trainer.validate() == trainer.validate()
    assert lists(trainer.states) == lists(states)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert torch.equal(trainer.batches.get_state(), generators[1])
    torch.manual_seed(8)
    loss = trainer.step()
    torch.manual_seed(8)
    assert other.step() == loss


def test_skipped_update_advances_the_states(
    config: TrainConfig, data: ByteLanes, corpus: Corpus
) -> None:
    trainer = Trainer(replace(config, precision="float16"), data)
    overflow_gradients(trainer)
    before = weights_of(trainer)
    stepped(trainer, 2)
    assert torch.equal(trainer.states[0][0], recent(corpus, [0, 1, 2], 2 * CONTEXT))
    assert_same_weights(trainer.model, before)


def test_failed_step_leaves_the_states_unchanged(config: TrainConfig, data: ByteLanes) -> None:
    trainer = stepped(Trainer(config, data), 1)
    before = copy.deepcopy(trainer.states)
    overflow_gradients(trainer)
    with pytest.raises(FloatingPointError):
        trainer.step()
    assert lists(trainer.states) == lists(before)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", get_args(Precision))
def test_memories_of_transformer_xl_resume_exactly(
    config: TrainConfig, data: ByteLanes, tmp_path: Path, precision: Precision, recompute: bool
) -> None:
    """Memories are in float32 in every precision. With dropout."""
    model = TransformerXLConfig(
        layers=2, heads=2, width=8, context=CONTEXT, memory=MEMORY, dropout=0.2
    )
    task = TransformerXLTask(model=model)
    config = replace(config, task=task, precision=precision, recompute=recompute)
    checkpoint = assert_resumes_exactly(stepped(Trainer(config, data), 4), tmp_path, 3)
    states = {name: x for name, x in checkpoint.tensors.items() if name.startswith("states.")}
    assert [x.dtype for x in states.values()] == [torch.float32] * 2


def test_task_without_a_state_has_no_states_in_its_checkpoints(corpus: Corpus) -> None:
    model = GeneratorConfig(layers=1, width=8, heads=2, context=CONTEXT)
    config = TrainConfig(task=GeneratorTask(model=model), batch=4, accumulate=2)
    trainer = Trainer(config, ByteWindows(corpus, CONTEXT))
    trainer.step()
    assert trainer.states == [(), ()]
    assert not [name for name in trainer.state()[1] if name.startswith("states")]


def test_data_without_lanes_are_refused(config: TrainConfig, corpus: Corpus) -> None:
    data: Dataset = ByteWindows(corpus, CONTEXT)
    with pytest.raises(TypeError, match="LaneDataset for the task recent-bytes, got ByteWindows"):
        Trainer(config, data)


def test_text_too_short_for_its_lanes_is_refused(config: TrainConfig, data: ByteLanes) -> None:
    Trainer(replace(config, batch=74), data)
    with pytest.raises(ValueError, match="75 lanes with a context of 12 need 901 bytes in the tr"):
        Trainer(replace(config, batch=75), data)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "it lacks the tensor states.0"),
        (torch.zeros(4, 24), r"states.0 must have shape \(5, 24\) .* got \(4, 24\)"),
        (torch.zeros(5, 30), r"states.0 must have shape \(5, 24\)"),
        (torch.zeros(5, 24).double(), "dtype torch.float32, got .* torch.float64"),
        (torch.full((5, 24), torch.nan), "states.0 must be finite"),
    ],
)
def test_damaged_states_are_named(
    config: TrainConfig, data: ByteLanes, tmp_path: Path, state: Tensor | None, message: str
) -> None:
    trainer = stepped(Trainer(config, data), 2)
    folder = write_checkpoint(tmp_path, *trainer.state(), ())
    edit_tensors(folder, {"states.0": state})
    other = Trainer(config, data)
    before = weights_of(other)
    with pytest.raises(CheckpointError, match=message):
        other.restore(Checkpoint.open(folder))
    assert (other.steps_done, other.states) == (0, [(), ()])
    assert_same_weights(other.model, before)


def test_states_at_the_end_of_the_lanes_must_be_empty(
    config: TrainConfig, data: ByteLanes, tmp_path: Path
) -> None:
    trainer = stepped(Trainer(config, data), 1)
    folder = write_checkpoint(tmp_path, *trainer.state(), ())
    steps = data.segments(LANES)
    edit_config(folder, lambda values: values.update(steps_done=steps, updates=steps))
    with pytest.raises(CheckpointError, match=r"it has the unknown tensor 'states.0'"):
        Trainer(config, data).restore(Checkpoint.open(folder))
