"""The state of one training run, and what a step and a validation do to it."""

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
from transformer_kernels.training.config import Precision, TrainConfig
from transformer_kernels.training.data import Batch, Dataset
from transformer_kernels.training.distributed import (
    SINGLE_PROCESS,
    DistributedContext,
    local_device,
)

_DTYPES: dict[Precision, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}

LEAST_SCALE = 2.0**-10
"""Losses are not scaled down further: what overflows then is no matter of precision."""


class Step(NamedTuple):
    """Of all processes."""

    loss: float
    """Before the update, nats"""
    tokens: int


class Validation(NamedTuple):
    loss: float
    """nats"""
    score: float
    """See `Task.score_name`"""


class Trainer:
    """A model, its optimizer, and the random states that decide what comes next.

    Making one seeds torch's generators with the config's seed.
    """

    def __init__(
        self, config: TrainConfig, data: Dataset, ranks: DistributedContext = SINGLE_PROCESS
    ) -> None:
        """ValueError where the device is missing, or a batch too small to be cut."""
        device = local_device(config.device)
        check_device(device)
        if config.batch < config.accumulate * ranks.count:
            raise ValueError(
                f"batch must be at least accumulate times the number of processes, "
                f"{config.accumulate} x {ranks.count}, got {config.batch}"
            )
        config = replace(config, task=config.task.fitted(data))
        self.config = config
        self.data = data
        self.ranks = ranks
        self.device = torch.device(device)
        self.steps_done = 0
        torch.manual_seed(config.seed)
        self.batches = torch.Generator().manual_seed(config.seed)
        self.model = config.task.build(config.attn_implementation).to(self.device)
        recompute_blocks(self.model, config.recompute)
        self.optimizer = _adamw(self.model, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "float16")
        self._parallel = ranks.wrap(self.model, self.device)
        if not ranks.is_first:
            torch.manual_seed(config.seed + ranks.rank)  # of dropout

    def step(self) -> Step:
        """One batch, one update.

        FloatingPointError where the loss or the gradient is not finite; the model is then as it
        was. In float16 such a gradient makes a smaller scale instead, and no update.
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
        if not self.scaler.is_enabled() or self.scaler.get_scale() < LEAST_SCALE:
            self._check_finite("gradient's norm", norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps_done += 1
        return Step(loss, config.task.tokens(batch))

    def _gradients(self, batch: Batch) -> float:
        """Those of the mean loss over a batch that all processes have drawn; returns the loss."""
        counts = self.config.task.counts(batch)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        parts = split(self.ranks.share(batch), self.config.accumulate)
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for n, part in enumerate(parts):
            with self._not_yet_shared(n + 1 < len(parts)):
                loss = self._loss(self._parallel, part, counts)
                total += loss.detach()
                # Gradients become means over processes, of which each has a part of the sum.
                self.scaler.scale(loss * self.ranks.count).backward()
        return self.ranks.sum(total)

    def _not_yet_shared(self, wanted: bool) -> contextlib.AbstractContextManager[None]:
        """Processes share their gradients once a step."""
        if wanted and isinstance(self._parallel, DistributedDataParallel):
            return self._parallel.no_sync()
        return contextlib.nullcontext()

    @torch.no_grad()
    def validate(self) -> Validation:
        """The loss and the score on held-out data, always the same; draws no random number.

        FloatingPointError where the loss is not finite.
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
        """The batch's share of a mean over `counts` terms."""
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
        """Everything that the next step depends on; every process has to ask for it."""
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
            "random": self.ranks.gather(random),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up where `state` was taken; CheckpointError where the data is other data, or there
        are more or fewer processes."""
        if state["data"]["digest"] != self.data.digest:
            raise CheckpointError(
                f"the checkpoint was trained on other data, {state['data']['name']}, "
                f"than {self.data.name}"
            )
        if len(state["random"]) != self.ranks.count:
            raise CheckpointError(
                f"the checkpoint was trained by {len(state['random'])} processes, "
                f"and there are {self.ranks.count}"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.steps_done = state["steps_done"]
        self.batches.set_state(state["batches"])
        random = state["random"][self.ranks.rank]
        torch.set_rng_state(random["cpu"])
        if self._on_gpu and random["device"] is not None:
            torch.cuda.set_rng_state(random["device"], self.device)

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"


def split(batch: Batch, parts: int) -> list[Batch]:
    """Of examples, as equal as can be."""
    cut = {name: x.tensor_split(parts) for name, x in batch.items()}
    return [{name: x[n] for name, x in cut.items()} for n in range(parts)]


def _adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=config.schedule.peak, betas=config.betas, eps=config.eps,
        weight_decay=config.weight_decay,
    )  # fmt: skip
