"""Small runs, edits of their checkpoints, and trainings on the processes of a group."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.hooks import RemovableHandle

from transformer_kernels.models import GeneratorConfig, GPT2Config
from transformer_kernels.training import (
    ByteWindows,
    Checkpoint,
    CheckpointError,
    CurveRow,
    Dataset,
    GeneratorTask,
    Schedule,
    Tokens,
    TrainConfig,
    Trainer,
    TrainingRun,
    corpus_from_bytes,
)
from transformer_kernels.training.data import TokenWindows
from transformer_kernels.training.distributed import SINGLE_PROCESS, grid_of_processes, own_shard
from transformer_kernels.training.tasks import GPT2Task

SHARD = "shard-00001-model-00001-of-00001.safetensors"


FINISHED = {".lock", "checkpoint-8", "curve.csv"}
"""Files of a run of eight steps"""

CONTEXT = 24
CORPUS = corpus_from_bytes(b"the quick brown fox jumps over the lazy dog. " * 40, "a fox")
LONG = corpus_from_bytes(b"the quick brown fox jumps over the lazy dog. " * 80, "a fox")
SIZES: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "context": CONTEXT}

GENERATOR = TrainConfig(
    task=GeneratorTask(model=GeneratorConfig(**SIZES)),
    steps=8,
    batch=5,
    schedule=Schedule(peak=1e-2, warmup=2),
    eval_every=4,
    eval_batches=3,
)
GPT2 = replace(GENERATOR, task=GPT2Task(model=GPT2Config(**SIZES, vocabulary=256, dropout=0.0)))
RUN = replace(GPT2, batch=6)
"""Stopped and resumed on other processes."""


def with_dropout(config: TrainConfig, share: float) -> TrainConfig:
    model = replace(config.task.model, dropout=share)
    return replace(config, task=replace(config.task, model=model))


def without_times(rows: list[CurveRow]) -> list[CurveRow]:
    return [row._replace(seconds=0.0, tokens_per_s=0.0) for row in rows]


def assert_same_weights(model: nn.Module, other: nn.Module | dict[str, Tensor]) -> None:
    expected = other.state_dict() if isinstance(other, nn.Module) else other
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name]), name


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in trainer.model.state_dict().items()}


def overflow_gradients(trainer: Trainer) -> RemovableHandle:
    """Makes the gradient of the output layer infinite or NaN."""
    weight = trainer.model.get_parameter("logits.weight")
    handle: RemovableHandle = weight.register_hook(lambda gradient: gradient / 0.0)
    return handle


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def put(folder: Path, name: str, content: bytes) -> None:
    """Replaces a file, and its checksum in the list of files."""
    (folder / name).write_bytes(content)
    checksums = json.loads((folder / "checksums.json").read_text())
    checksums[name] = zlib.crc32(content)
    (folder / "checksums.json").write_text(json.dumps(checksums))


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((folder / "config.json").read_text())
    change(values)
    put(folder, "config.json", json.dumps(values).encode())


def edit_tensors(
    folder: Path,
    changes: Mapping[str, Tensor | None],
    offsets: Mapping[str, Any] | None = None,
    name: str = SHARD,
) -> None:
    """Replaces tensors of a file, removes those that are None, and moves those with offsets."""
    with safe_open(folder / name, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
    tensors = {key: x for key, x in (tensors | dict(changes)).items() if x is not None}
    for key, x in tensors.items():
        places.setdefault(key, {"saved_offsets": [0] * x.dim()})
    places |= {key: {"saved_offsets": at} for key, at in (offsets or {}).items()}
    put(folder, name, save(tensors, {"DCP_SHARDING_INFO": json.dumps(places)}))


def data_of(config: TrainConfig) -> Dataset:
    context = config.task.model.context
    if config.task.kind == "gpt2":
        return TokenWindows(LONG if context > CONTEXT else CORPUS, Tokens(), context)
    return ByteWindows(CORPUS, context)


def losses(trainer: Trainer, steps: int = 4) -> list[float]:
    """Losses of some steps, the last loss on held-out data and the last gradient's norm."""
    found = [trainer.step().loss for _ in range(steps)]
    return [*found, trainer.validate().loss]


def check_losses(**grid: Any) -> None:
    """Losses on a grid of the processes are those of a single process, to rounding."""
    for config in (
        GENERATOR,
        replace(GPT2, batch=9, accumulate=2, recompute=True),
        # The last batch of a validation has no example for the last rank.
        replace(GPT2, attn_implementation="eager", batch=dist.get_world_size(), eval_batches=4),
        replace(GPT2, precision="bfloat16"),
    ):
        rtol = 1e-5 if config.precision == "float32" else 1e-3
        expected = losses(Trainer(config, data_of(config), SINGLE_PROCESS))
        found = losses(Trainer(config, data_of(config), grid_of_processes(**grid)))
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=rtol, atol=0.0)


def check_context_parallel() -> None:
    check_losses(context_parallel=2)
    if dist.get_world_size() > 2:
        check_losses(context_parallel=dist.get_world_size())


def check_sharded() -> None:
    check_losses(sharded=True)
    check_losses(sharded=True, context_parallel=2)


def start_or_resume(folder: Path, config: TrainConfig, **grid: Any) -> TrainingRun:
    """A run in a folder: the rest of the one there, if any, or a new one. A collective."""
    distributed = grid_of_processes(**grid)
    data = data_of(config)
    with distributed.on_all_ranks(OSError):  # no rank starts before another has looked
        resumes = any(folder.glob("checkpoint-*"))
    if resumes:
        return TrainingRun.resume(folder, data=data, distributed=distributed)
    return TrainingRun.start(config, data, out=folder, distributed=distributed)


def train_until(run: TrainingRun, step: int) -> list[float]:
    """Trains up to a step; returns all losses so far, with those on held-out data."""
    result = run.train(should_stop=lambda: run.trainer.steps_done == step)
    return [x for row in result.rows for x in (row.train_loss, row.val_loss) if x is not None]


def train_part(folder: str, stop: str, context_parallel: str, sharded: str) -> None:
    """Trains `RUN` up to a step on a grid of these processes, from its checkpoint if any."""
    grid = {"context_parallel": int(context_parallel), "sharded": bool(int(sharded))}
    train_until(start_or_resume(Path(folder), RUN, **grid), int(stop))


def check_sharded_checkpoints(folder: str) -> None:
    """On the same grid a run resumes with the same bits; a damaged file is refused on all ranks."""
    sizes = replace(GPT2.task.model, context=64, dropout=0.2)
    config = replace(GPT2, task=GPT2Task(model=sizes), batch=3, steps=5, eval_every=5)
    grids: tuple[dict[str, Any], ...] = ({}, {"context_parallel": 2})
    for n, grid in enumerate({"sharded": True} | grid for grid in grids):
        whole, stopped = Path(folder) / f"whole {n}", Path(folder) / f"stopped {n}"
        expected = train_until(start_or_resume(whole, config, **grid), 0)
        train_until(start_or_resume(stopped, config, **grid), 2)
        check_invalid_shard(stopped, config, **grid)
        assert train_until(start_or_resume(stopped, config, **grid), 0) == expected


def check_invalid_shard(folder: Path, config: TrainConfig, **grid: Any) -> None:
    """A number that is not finite in the file of the last rank: nothing is restored, on any."""
    distributed = grid_of_processes(**grid)
    checkpoint = folder / "checkpoint-2"
    file = sorted(checkpoint.glob("*.safetensors"))[-1]
    kept = {path: path.read_bytes() for path in (file, checkpoint / "checksums.json")}
    trainer = Trainer(config, data_of(config), distributed)
    before = {name: own_shard(x).clone() for name, x in trainer.model.state_dict().items()}
    with distributed.on_all_ranks(OSError):
        if distributed.is_main:
            size = (config.task.model.width // distributed.world_size,)
            edit_tensors(
                checkpoint, {"model.last_norm.weight": torch.full(size, torch.inf)}, {}, file.name
            )
    with pytest.raises(
        CheckpointError, match=r"checkpoint-2: model\.last_norm\.weight must be finite"
    ):
        trainer.restore(Checkpoint.open(folder))
    assert trainer.steps_done == 0
    assert not trainer.optimizer.state
    for name, x in trainer.model.state_dict().items():
        assert torch.equal(own_shard(x), before[name]), name
    with distributed.on_all_ranks(OSError):
        if distributed.is_main:
            for path, content in kept.items():
                path.write_bytes(content)
