"""Trainer: the state of one training run, its training step and its validation."""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..models.generation import inference
from ..nn.blocks import recompute_blocks
from ..nn.options import check_device, check_positive
from .checkpoint import Checkpoint, CheckpointError, Metadata
from .config import Precision, TrainConfig
from .data import Batch, Dataset, LaneDataset
from .distributed import SINGLE_PROCESS, DistributedContext, check_scale_out, local_device, whole
from .task import RecurrentTask, State, Task

_DTYPES: dict[Precision, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}

_MOMENTS = ("exp_avg", "exp_avg_sq")

MIN_LOSS_SCALE = 2.0**-10
"""Loss scale (float16) below which a gradient that is not finite is an error."""


class Step(NamedTuple):
    """Result of one training step, over all processes."""

    loss: float
    """Mean loss before the update, in nats"""
    tokens: int


class Evaluation(NamedTuple):
    """Loss and score on held-out data."""

    score: float
    """See `Task.score_name`"""
    loss: float
    """Mean loss, in nats"""
    tokens: int
    """Number of tokens that were predicted; of all losses together"""


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
            ValueError: the device cannot be used, the work cannot be divided over the processes
                (`check_scale_out`), or the text is too short for lanes.
        """
        device = local_device(config.device)
        check_device(device)
        check_scale_out(config, distributed)
        self.config = config = replace(config, task=config.task.fitted(data))
        self.data, self._lanes = data, _lanes(config, data)
        self.distributed, self.device = distributed, torch.device(device)
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
    def validate(self) -> Evaluation:
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
            score = config.task.score(self.model, self.data, on_device, loss)
        return Evaluation(score, loss, counts.total())

    def _held_out(self) -> list[Batch]:
        """The batches of a validation, in order."""
        config = self.config
        if self._lanes is not None:
            return list(islice(self._lanes.held_out_segments(config.batch), config.eval_batches))
        return in_batches(self.data.held_out(config.batch * config.eval_batches), config.batch)

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
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def _check_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            rate = self.optimizer.param_groups[0]["lr"]
            raise FloatingPointError(
                f"the {name} is {value} after step {self.steps_done}: try a lower learning rate "
                f"than {rate:g}"
            )

    def state(self) -> tuple[Metadata, dict[str, Tensor]]:
        """Everything that the next step depends on. A collective: all ranks must call it.

        Weights and moments are divided over the ranks if the parameters are. All ranks have the
        random states of all.
        """
        grid, moments = self.distributed, list(self.optimizer.state.values())
        scaler = self.scaler.state_dict()
        metadata = Metadata(
            config=self.config,
            data=self.data.name,
            source=self.data.source,
            digest=self.data.digest,
            extra=self.config.task.extra(self.data),
            steps_done=self.steps_done,
            updates=int(moments[0]["step"]) if moments else 0,
            scaler=(scaler["scale"], scaler["_growth_tracker"]) if scaler else None,
            processes=grid.world_size,
            context_parallel=grid.context_parallel,
        )
        tensors = self.model.state_dict(prefix="model.")
        for number, values in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{key}": values[key] for key in _MOMENTS}
        parts = [torch.cat(parts).cpu() for parts in zip(*self.states, strict=True)]
        tensors |= grid.unshard({f"states.{n}": x for n, x in enumerate(parts)})
        tensors["batches"] = self.batches.get_state()
        for device, state in self._random_states().items():
            tensors[f"random.{device}"] = torch.stack(grid.all_gather(state))
        return metadata, tensors

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restores a state of any number of processes. A collective.

        On another grid of processes, random numbers of dropout begin anew, from the seed, the rank
        and the step.

        Raises:
            CheckpointError: a tensor is absent or invalid, or the data differ. Model and optimizer
                are unchanged.
        """
        metadata, grid = checkpoint.metadata, self.distributed
        if metadata.digest != self.data.digest:
            raise CheckpointError(
                f"{checkpoint.folder}: the checkpoint was trained on other data: {metadata.data}, "
                f"not {self.data.name}"
            )
        with grid.on_all_ranks(CheckpointError):
            tensors = checkpoint.read(self._expected(metadata))
            try:
                self._restore_random(metadata, tensors)
            except RuntimeError:
                text = "a random state is not one of torch's generators"
                raise CheckpointError(f"{checkpoint.folder}: {text}") from None
        self.model.load_state_dict(_without_prefix(tensors, "model."))
        groups = self.optimizer.state_dict()["param_groups"]  # settings are those of the config
        moments: dict[int, dict[str, Tensor]] = {}
        for name, x in _without_prefix(tensors, "optimizer.").items():
            number, _, key = name.partition(".")
            step = torch.tensor(float(metadata.updates))
            moments.setdefault(int(number), {"step": step})[key] = x
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        if metadata.scaler is not None:
            names = dict(zip(("scale", "_growth_tracker"), metadata.scaler, strict=True))
            self.scaler.load_state_dict(self.scaler.state_dict() | names)
        self.steps_done = metadata.steps_done
        lanes = _without_prefix(tensors, "states.")
        parts = split(grid.shard(lanes), self.config.accumulate)
        self.states = [tuple(x.to(self.device) for x in part.values()) for part in parts]

    def _restore_random(self, metadata: Metadata, tensors: dict[str, Tensor]) -> None:
        grid = self.distributed
        self.batches.set_state(tensors["batches"])
        here = (grid.world_size, grid.context_parallel)
        if (metadata.processes, metadata.context_parallel) != here:
            text = f"{self.config.seed} {grid.rank} {metadata.steps_done}"
            torch.manual_seed(random.Random(text).getrandbits(63))
            return
        own = {name: tensors[f"random.{name}"][grid.rank].clone() for name in self._random_states()}
        torch.set_rng_state(own["cpu"])  # without the clone torch reads past the storage
        if "cuda" in own:
            torch.cuda.set_rng_state(own["cuda"], self.device)

    def _expected(self, metadata: Metadata) -> dict[str, Tensor]:
        """Tensors with the names, shapes and dtypes that a state with these numbers has."""
        expected = self.model.state_dict(prefix="model.")
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if metadata.updates:
            trained = {n: p.detach() for n, p in enumerate(parameters) if p.requires_grad}
            expected |= {f"optimizer.{n}.{key}": p for n, p in trained.items() for key in _MOMENTS}
        segments = self._segments_done(metadata.steps_done)
        if segments:
            assert isinstance(self.config.task, RecurrentTask)
            for n, shape in enumerate(self.config.task.state_shapes(self.config.batch, segments)):
                expected[f"states.{n}"] = parameters[0].new_empty(shape, device="meta")
        expected["batches"] = self.batches.get_state()
        for device, state in self._random_states().items():
            expected[f"random.{device}"] = state.expand(metadata.processes, -1)
        return expected

    def _random_states(self) -> dict[str, Tensor]:
        """States of this process's global generators, by type of device."""
        states = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return states


def split(batch: Batch, parts: int) -> list[Batch]:
    """Splits the examples of a batch into `parts` micro-batches of nearly equal size."""
    pieces = {name: x.tensor_split(parts) for name, x in batch.items()}
    return [{name: x[n] for name, x in pieces.items()} for n in range(parts)]


def in_batches(examples: Batch, size: int) -> list[Batch]:
    """Splits examples into batches of at most this size."""
    count = len(next(iter(examples.values())))
    return split(examples, -(-count // size))


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


def _adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=config.schedule.peak, betas=config.betas, eps=config.eps,
        weight_decay=config.weight_decay,
    )  # fmt: skip


def _without_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names have a prefix, without it."""
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def evaluate(
    task: Task, model: nn.Module, data: LaneDataset, *, lanes: int, segments: int | None = None
) -> Evaluation:
    """Computes loss and score on the held-out lanes of a text, in order.

    A model with a state starts with an empty one and carries it from segment to segment. Draws no
    random numbers.

    Args:
        task: task of the model.
        model: a model of the task; its training mode is restored.
        data: the text.
        lanes: number of lanes, which are read side by side; fewer if the text is too short.
        segments: number of segments of each lane to read; all unless given.

    Raises:
        ValueError: `lanes` is not positive.
    """
    return _evaluated(task, model, data, islice(data.held_out_segments(lanes), segments))


def evaluate_examples(
    task: Task, model: nn.Module, data: Dataset, *, count: int, batch: int = 32
) -> Evaluation:
    """Computes loss and score on up to `count` held-out examples, the same at every call.

    `batch` is the most examples that are read at a time, as by `evaluate`.

    Raises:
        ValueError: `count` or `batch` is not positive.
    """
    check_positive("count", count)
    check_positive("batch", batch)
    return _evaluated(task, model, data, in_batches(data.held_out(count), batch))


def _evaluated(task: Task, model: nn.Module, data: Dataset, batches: Iterable[Batch]) -> Evaluation:
    counts, totals = Counter[str](), defaultdict[str, float](float)
    read: list[Batch] = []
    state: State = ()
    with inference(model) as device:
        for batch in batches:
            counts.update(task.counts(batch))
            read.append({name: x.to(device) for name, x in batch.items()})
            sums, state = task.carry(model, read[-1], state)
            for name, x in sums.items():
                totals[name] += x.item()
        loss = math.fsum(total / max(1, counts[name]) for name, total in totals.items())
        return Evaluation(task.score(model, data, read, loss), loss, counts.total())
