"""Trainer: the state of one training run, its training step and its validation."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from transformer_kernels.nn.blocks import recompute_blocks
from transformer_kernels.nn.options import check_device
from transformer_kernels.training.checkpoint import CheckpointError
from transformer_kernels.training.checkpoint_schema import check_state, entry
from transformer_kernels.training.config import Precision, TrainConfig
from transformer_kernels.training.data import Batch, Dataset
from transformer_kernels.training.distributed import (
    SINGLE_PROCESS,
    DistributedContext,
    local_device,
)
from transformer_kernels.training.memory import check_batch_fits, check_model_fits

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
            ValueError: the device cannot be used, the batch is smaller than the number of
                micro-batches over all processes, or the machine lacks the memory.
        """
        device = local_device(config.device)
        check_device(device)
        if config.batch < config.accumulate * distributed.world_size:
            raise ValueError(
                f"batch must be at least accumulate times the number of processes, "
                f"{config.accumulate} x {distributed.world_size}, got {config.batch}"
            )
        config = replace(config, task=config.task.fitted(data))
        check_model_fits(config.task, training=torch.device(device).type == "cpu")
        check_batch_fits(config.batch, data)
        self.config = config
        self.data = data
        self.distributed = distributed
        self.device = torch.device(device)
        self.steps_done = 0
        torch.manual_seed(config.seed)
        self.batches = torch.Generator().manual_seed(config.seed)
        self.model = config.task.build(config.attn_implementation).to(self.device)
        recompute_blocks(self.model, config.recompute)
        self.optimizer = _adamw(self.model, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "float16")
        self._parallel = distributed.wrap(self.model, self.device)
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
        batch = self.data.draw(config.batch, self.batches)
        loss = self._gradients(batch)
        self._check_finite("loss", loss)
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.clip).item()
        if not self.scaler.is_enabled() or self.scaler.get_scale() < MIN_LOSS_SCALE:
            self._check_finite("gradient's norm", norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps_done += 1
        return Step(loss, config.task.tokens(batch))

    def _gradients(self, batch: Batch) -> float:
        """Computes the gradients of the batch's mean loss; returns the loss."""
        counts = self.config.task.counts(batch)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        parts = split(self.distributed.shard(batch), self.config.accumulate)
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for n, part in enumerate(parts):
            with self._no_sync(n + 1 < len(parts)):
                loss = self._loss(self._parallel, part, counts)
                total += loss.detach()
                # DistributedDataParallel averages over ranks; the loss is a sum over ranks.
                self.scaler.scale(loss * self.distributed.world_size).backward()
        return self.distributed.all_reduce_sum(total)

    def _no_sync(self, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Skips the all-reduce of gradients, which only the last micro-batch needs."""
        if enabled and isinstance(self._parallel, DistributedDataParallel):
            return self._parallel.no_sync()
        return contextlib.nullcontext()

    @torch.no_grad()
    def validate(self) -> Validation:
        """Computes loss and score on held-out data, the same data each time.

        Draws no random numbers.

        Raises:
            FloatingPointError: the loss is not finite.
        """
        config = self.config
        held_out = self.data.held_out(config.batch * config.eval_batches)
        counts = config.task.counts(held_out)
        examples = len(next(iter(held_out.values())))
        batches = split(held_out, -(-examples // config.batch))
        self.model.eval()
        loss = sum(self._loss(self.model, batch, counts).item() for batch in batches)
        self._check_finite("held-out loss", loss)
        on_device = (self._to_device(batch) for batch in batches)
        with self._autocast():
            return Validation(loss, config.task.score(self.model, self.data, on_device, loss))

    def _loss(self, model: nn.Module, batch: Batch, counts: dict[str, int]) -> Tensor:
        """The batch's contribution to a mean over `counts` terms."""
        with self._autocast():
            sums = self.config.task.losses(model, self._to_device(batch))
        return torch.stack([sums[name] / max(1, counts[name]) for name in counts]).sum()

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
        """Everything that the next step depends on. A collective: all ranks must call it."""
        random = {
            "cpu": torch.get_rng_state(),
            "device": torch.cuda.get_rng_state(self.device) if self._on_gpu else None,
        }
        return {
            "config": self.config.to_dict(),
            "data": {name: getattr(self.data, name) for name in ("name", "source", "digest")},
            "extra": self.config.task.extra(self.data),
            "steps_done": self.steps_done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "batches": self.batches.get_state(),
            "random": self.distributed.all_gather(random),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a state returned by `state`.

        Raises:
            CheckpointError: an entry is absent or invalid, or the data or the number of processes
                differs. Nothing has been restored.
        """
        if entry(state, "data.digest", str) != self.data.digest:
            raise CheckpointError(
                f"the checkpoint was trained on other data: {entry(state, 'data.name', str)}, "
                f"not {self.data.name}"
            )
        check_state(
            state,
            config=self.config,
            model=self.model,
            optimizer=self.optimizer,
            scaler=self.scaler.state_dict(),
            world_size=self.distributed.world_size,
        )
        self.model.load_state_dict(state["model"])
        groups = self.optimizer.state_dict()["param_groups"]  # settings are those of the config
        moments = state["optimizer"]["state"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.scaler.load_state_dict(state["scaler"])
        self.steps_done = state["steps_done"]
        self.batches.set_state(state["batches"])
        random = state["random"][self.distributed.rank]
        torch.set_rng_state(random["cpu"])
        if self._on_gpu and random["device"] is not None:
            torch.cuda.set_rng_state(random["device"], self.device)

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"


def split(batch: Batch, parts: int) -> list[Batch]:
    """Splits the examples of a batch into `parts` micro-batches of nearly equal size."""
    pieces = {name: x.tensor_split(parts) for name, x in batch.items()}
    return [{name: x[n] for name, x in pieces.items()} for n in range(parts)]


def _adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=config.schedule.peak, betas=config.betas, eps=config.eps,
        weight_decay=config.weight_decay,
    )  # fmt: skip
