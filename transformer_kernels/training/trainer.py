"""Trainer: the state of one training run, its training step and its validation."""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..nn.blocks import recompute_blocks
from ..nn.options import check_device
from .checkpoint import CheckpointError, read_own_shards
from .checkpoint_schema import check_state, check_states, entry
from .config import Precision, TrainConfig
from .data import Batch, Dataset, LaneDataset
from .distributed import SINGLE_PROCESS, DistributedContext, local_device
from .memory import check_batch_fits, check_model_fits
from .scale_out import check_scale_out
from .shard_files import ShardFiles
from .sharding import from_own_shard, from_whole, own_shard, whole
from .task import RecurrentTask, Shapes, State

_DTYPES: dict[Precision, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}

MIN_LOSS_SCALE = 2.0**-10
"""Loss scale (float16) below which a gradient that is not finite is an error."""


class Step(NamedTuple):
    """Result of one training step, over all processes."""

    loss: float
    """Mean loss before the update, in nats"""
    tokens: int


class Validation(NamedTuple):
    """Result of one validation."""

    loss: float
    """Mean loss, in nats"""
    score: float
    """See `Task.score_name`"""


class Trainer:
    """Model, optimizer and random states of a run.

    The data of a `RecurrentTask` are read in as many lanes as a batch has examples. A lane stays
    with its process and micro-batch, and `states` has the state of each micro-batch.

    The constructor seeds torch's global generators with the config's seed.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: Dataset,
        distributed: DistributedContext = SINGLE_PROCESS,
    ) -> None:
        """Builds the model and its optimizer.

        Raises:
            TypeError: the task is a `RecurrentTask`, but the data cannot be read in lanes.
            ValueError: the device cannot be used, the batch is smaller than the number of
                micro-batches over all processes, the task, its context or its attention cannot be
                divided over processes, the machine lacks the memory, or the text is too short for
                lanes.
        """
        device = local_device(config.device)
        check_device(device)
        check_scale_out(config, distributed)
        config = replace(config, task=config.task.fitted(data))
        check_model_fits(
            config.task,
            training=torch.device(device).type == "cpu",
            shards=distributed.world_size if distributed.sharded else 1,
        )
        check_batch_fits(config.batch, data)
        self._lanes = _lanes(config, data)
        self.config = config
        self.data = data
        self.distributed = distributed
        self.device = torch.device(device)
        self.steps_done = 0
        self.states: list[State] = [()] * config.accumulate
        torch.manual_seed(config.seed)
        self.batches = torch.Generator().manual_seed(config.seed)
        self.model = config.task.build(config.attn_implementation)
        recompute_blocks(self.model, config.recompute)
        self._parallel = distributed.wrap(self.model, self.device)
        self.optimizer = _adamw(self.model, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "float16")
        if not distributed.is_main:
            torch.manual_seed(config.seed + distributed.rank)  # each rank draws its own dropout

    def step(self) -> Step:
        """Trains on one batch.

        In float16, a gradient that is not finite reduces the loss scale and skips the update.

        Raises:
            FloatingPointError: the loss or the gradient is not finite; the model is unchanged.
        """
        config = self.config
        rate = config.schedule.learning_rate(self.steps_done, config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = self._draw()
        loss, states = self._gradients(batch)
        self._check_finite("loss", loss)
        self.scaler.unscale_(self.optimizer)
        norm = whole(nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)).item()
        if not self.scaler.is_enabled() or self.scaler.get_scale() < MIN_LOSS_SCALE:
            self._check_finite("gradient's norm", norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps_done += 1
        at_end = self._segments_done(self.steps_done) == 0
        self.states = [()] * config.accumulate if at_end else states
        return Step(loss, config.task.tokens(batch))

    def _draw(self) -> Batch:
        """The batch of the next step, the same on all ranks."""
        if self._lanes is None:
            return self.data.draw(self.config.batch, self.batches)
        return self._lanes.segment(self._segments_done(self.steps_done), self.config.batch)

    def _segments_done(self, steps: int) -> int:
        """Number of segments read after `steps` steps in this pass over the lanes, if any."""
        return 0 if self._lanes is None else steps % self._lanes.segments(self.config.batch)

    def _gradients(self, batch: Batch) -> tuple[float, list[State]]:
        """Computes the gradients of the batch's mean loss; returns the loss and the new states."""
        counts = self.config.task.counts(batch)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        parts = split(self.distributed.shard(batch), self.config.accumulate)
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        states: list[State] = []
        for n, part in enumerate(parts):
            with self._no_sync(n + 1 < len(parts)), self.distributed.divided():
                loss, state = self._loss(self._parallel, part, counts, self.states[n])
                states.append(state)
                total += loss.detach()
                # Gradients are averaged over ranks; the loss is a sum over ranks.
                self.scaler.scale(loss * self.distributed.world_size).backward()
        return self.distributed.all_reduce_sum(total), states

    def _no_sync(self, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Skips the all-reduce of gradients, which only the last micro-batch needs."""
        if enabled and isinstance(self._parallel, DistributedDataParallel):
            return self._parallel.no_sync()
        return contextlib.nullcontext()

    @torch.no_grad()
    def validate(self) -> Validation:
        """Computes loss and score on held-out data, the same data each time.

        Where forward passes are collectives, all ranks must call it; the ranks divide the data.
        Otherwise any one rank may.

        With a `RecurrentTask`, it is the first `eval_batches` segments of as many held-out lanes as
        a batch has examples, in order, from an empty state. Draws no random numbers.

        Raises:
            FloatingPointError: the loss is not finite.
        """
        config = self.config
        batches = self._held_out()
        counts = Counter[str]()
        for batch in batches:
            counts.update(config.task.counts(batch))
        self.model.eval()
        together = self.distributed.forward_is_collective
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        state: State = ()
        with self.distributed.divided():
            for batch in batches:
                mine = self.distributed.shard(batch) if together else batch
                part, state = self._loss(self.model, mine, counts, state)
                total += part
        loss = self.distributed.all_reduce_sum(total) if together else total.item()
        self._check_finite("held-out loss", loss)
        on_device = (self._to_device(batch) for batch in batches)
        with self._autocast():
            return Validation(loss, config.task.score(self.model, self.data, on_device, loss))

    def _held_out(self) -> list[Batch]:
        """The batches of a validation, in order."""
        config = self.config
        if self._lanes is not None:
            return list(islice(self._lanes.held_out_segments(config.batch), config.eval_batches))
        held_out = self.data.held_out(config.batch * config.eval_batches)
        examples = len(next(iter(held_out.values())))
        return split(held_out, -(-examples // config.batch))

    def _loss(
        self, model: nn.Module, batch: Batch, counts: dict[str, int], state: State
    ) -> tuple[Tensor, State]:
        """The batch's contribution to a mean over `counts` terms, and the new state."""
        with self._autocast():
            sums, state = self.config.task.carry(model, self._to_device(batch), state)
        return torch.stack([sums[name] / max(1, counts[name]) for name in counts]).sum(), state

    def _to_device(self, batch: Batch) -> Batch:
        return {name: x.to(self.device) for name, x in batch.items()}

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        dtype = _DTYPES.get(self.config.precision)
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype)

    def _check_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            rate = self.optimizer.param_groups[0]["lr"]
            raise FloatingPointError(
                f"the {name} is {value} after step {self.steps_done}: try a lower learning rate "
                f"than {rate:g}"
            )

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on. A collective: all ranks must call it.

        Weights and moments are divided over the ranks if the parameters are.
        """
        own_random = {
            "cpu": torch.get_rng_state(),
            "device": torch.cuda.get_rng_state(self.device) if self._on_gpu else None,
        }
        state = {
            "config": self.config.to_dict(),
            "data": {name: getattr(self.data, name) for name in ("name", "source", "digest")},
            "extra": self.config.task.extra(self.data),
            "steps_done": self.steps_done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "batches": self.batches.get_state(),
            "random": self.distributed.all_gather(own_random),
        }
        if self.distributed.context_parallel > 1:
            state["context_parallel"] = self.distributed.context_parallel
        if self._lanes is not None:
            states = [tuple(_own_copy(x) for x in part) for part in self.states]
            state["states"] = self.distributed.all_gather(states)
        return state

    def restore(self, state: dict[str, Any], shards: ShardFiles | None = None) -> None:
        """Restores a state returned by `state`, of any number of processes. A collective.

        On another grid of processes, random numbers of dropout begin anew, from the seed, the rank
        and the step. The lanes of a `RecurrentTask` need the same number of processes.

        Args:
            state: undivided tensors on the CPU; or, with `shards`, meta tensors in their places.
            shards: files that each rank reads its shards from; only if parameters are divided.

        Raises:
            CheckpointError: an entry is absent or invalid, the data differ, or the number of
                processes differs and there are lanes. Nothing has been restored.
        """
        if entry(state, "data.digest", str) != self.data.digest:
            raise CheckpointError(
                f"the checkpoint was trained on other data: {entry(state, 'data.name', str)}, "
                f"not {self.data.name}"
            )
        weights = self.model.state_dict()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if shards is not None:
            read_own_shards(
                state, shards, weights=weights, parameters=parameters, distributed=self.distributed
            )
        with self.distributed.on_all_ranks(CheckpointError):
            self._check(state, weights, parameters, own_shard if shards else _same)
        divided = from_whole if shards is None else from_own_shard
        self.model.load_state_dict(
            {name: divided(x, weights[name]) for name, x in state["model"].items()}
        )
        groups = self.optimizer.state_dict()["param_groups"]  # settings are those of the config
        moments = {
            n: {key: divided(x, parameters[n]) if x.dim() else x for key, x in values.items()}
            for n, values in state["optimizer"]["state"].items()
        }
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.scaler.load_state_dict(state["scaler"])
        self.steps_done = state["steps_done"]
        self.batches.set_state(state["batches"])
        self._restore_random(state)
        if self._lanes is not None:
            mine = state["states"][self.distributed.rank]
            self.states = [tuple(x.to(self.device) for x in part) for part in mine]

    def _check(
        self,
        state: dict[str, Any],
        weights: dict[str, Tensor],
        parameters: list[Tensor],
        part: Callable[[Tensor], Tensor],
    ) -> None:
        """Checks a state whose tensors are parts of those of the trainer."""
        check_state(
            state,
            config=self.config,
            weights={name: part(x) for name, x in weights.items()},
            optimizer=self.optimizer,
            parameters=[part(x) for x in parameters],
            scaler=self.scaler.state_dict(),
        )
        if self._lanes is None:
            return
        processes = len(state["random"])
        if processes != self.distributed.world_size:
            raise CheckpointError(
                f"the checkpoint was trained by {processes} processes, but this run has "
                f"{self.distributed.world_size}, and the lanes of the text belong to processes"
            )
        dtype = next(self.model.parameters()).dtype
        check_states(state, self._state_shapes(state["steps_done"]), dtype)

    def _restore_random(self, state: dict[str, Any]) -> None:
        """Restores the generators of dropout on the same grid; seeds them on another."""
        grid = self.distributed
        saved = (len(state["random"]), state.get("context_parallel", 1))
        if saved != (grid.world_size, grid.context_parallel):
            text = f"{self.config.seed} {grid.rank} {self.steps_done}"
            torch.manual_seed(random.Random(text).getrandbits(63))
            return
        own = state["random"][grid.rank]
        torch.set_rng_state(own["cpu"])
        if self._on_gpu and own["device"] is not None:
            torch.cuda.set_rng_state(own["device"], self.device)

    def _state_shapes(self, steps: int) -> list[list[Shapes]]:
        """Shapes of the states after `steps` steps, by rank and micro-batch."""
        config, world_size = self.config, self.distributed.world_size
        assert isinstance(config.task, RecurrentTask)
        segments = self._segments_done(steps)
        if segments == 0:
            return [[()] * config.accumulate] * world_size
        lanes = {"lanes": torch.arange(config.batch)}
        shards = [DistributedContext(rank, world_size).shard(lanes) for rank in range(world_size)]
        return [
            [
                config.task.state_shapes(len(part["lanes"]), segments)
                for part in split(shard, config.accumulate)
            ]
            for shard in shards
        ]

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"


def split(batch: Batch, parts: int) -> list[Batch]:
    """Splits the examples of a batch into `parts` micro-batches of nearly equal size."""
    pieces = {name: x.tensor_split(parts) for name, x in batch.items()}
    return [{name: x[n] for name, x in pieces.items()} for n in range(parts)]


def _lanes(config: TrainConfig, data: Dataset) -> LaneDataset | None:
    """The data of a `RecurrentTask`; None for other tasks."""
    if not isinstance(config.task, RecurrentTask):
        return None
    if not isinstance(data, LaneDataset):
        raise TypeError(
            f"data must be a LaneDataset for the task {config.task.kind}, got {type(data).__name__}"
        )
    data.segments(config.batch)  # raises ValueError for a text that is too short
    return data


def _own_copy(x: Tensor) -> Tensor:
    """A contiguous copy on the CPU. A view would be saved with all of its storage."""
    return x.to("cpu").clone(memory_format=torch.contiguous_format)


def _adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=config.schedule.peak, betas=config.betas, eps=config.eps,
        weight_decay=config.weight_decay,
    )  # fmt: skip


def _same(x: Tensor) -> Tensor:
    return x
