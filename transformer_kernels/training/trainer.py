"""The state of one training run, and what a step and a validation do to it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from transformer_kernels.models.generator import TextGenerator
from transformer_kernels.nn.options import check_device
from transformer_kernels.training.checkpoint import CheckpointError
from transformer_kernels.training.config import TrainConfig
from transformer_kernels.training.data import Corpus, draw_batch, even_batch


class GeneratorTrainer:
    """A model, its optimizer, and the random states that decide what comes next.

    Making one seeds torch's generators with the config's seed.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus) -> None:
        """ValueError where the corpus is too short for the context, or the device is missing."""
        check_device(config.device)
        corpus.check_length(config.model.context)
        self.config = config
        self.corpus = corpus
        self.device = torch.device(config.device)
        self.steps_done = 0
        torch.manual_seed(config.seed)
        self.batches = torch.Generator().manual_seed(config.seed)
        self.model = TextGenerator(config.model, attention=config.attention).to(self.device)
        self.optimizer = _adamw(self.model, config)

    def step(self) -> float:
        """One batch, one update; returns the loss before it (nats a byte).

        FloatingPointError where the loss or the gradient is not finite; the model is then as it
        was.
        """
        config = self.config
        rate = config.schedule.learning_rate(self.steps_done, config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = draw_batch(
            self.corpus.train,
            batch=config.batch,
            context=config.model.context,
            generator=self.batches,
        )
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(inputs, targets)
        value = loss.item()
        self._check_finite("loss", value)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self._check_finite("gradient's norm", norm.item())
        self.optimizer.step()
        self.steps_done += 1
        return value

    @torch.no_grad()
    def validate(self) -> float:
        """The loss (nats a byte) on windows spread evenly over the held-out text, always the same
        ones; draws no random number.

        A byte is predicted from those before it in its window, few at a window's start: the loss
        with a full context before each byte is lower. FloatingPointError where it is not finite.
        """
        config = self.config
        inputs, targets = even_batch(
            self.corpus.validation,
            batch=config.batch * config.eval_batches,
            context=config.model.context,
        )
        self.model.eval()
        total = 0.0
        for x, y in zip(
            torch.split(inputs, config.batch), torch.split(targets, config.batch), strict=True
        ):
            total += self._loss(x, y).item() * len(x)
        loss = total / len(inputs)
        self._check_finite("held-out loss", loss)
        return loss

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(inputs.to(self.device))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.to(self.device).flatten())

    def _check_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            rate = self.optimizer.param_groups[0]["lr"]
            raise FloatingPointError(
                f"the {name} is {value} after step {self.steps_done}: try a lower learning rate "
                f"than {rate:g}"
            )

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "config": self.config.to_dict(),
            "corpus": {
                "name": self.corpus.name,
                "source": self.corpus.source,
                "digest": self.corpus.digest,
            },
            "steps_done": self.steps_done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "batches": self.batches.get_state(),
            "random": torch.get_rng_state(),
            "random_device": (
                torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
            ),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up where `state` was taken; CheckpointError where the text is another one."""
        if state["corpus"]["digest"] != self.corpus.digest:
            raise CheckpointError(
                f"the checkpoint was trained on another text, {state['corpus']['name']}, "
                f"than {self.corpus.name}"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps_done = state["steps_done"]
        self.batches.set_state(state["batches"])
        torch.set_rng_state(state["random"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_device"], self.device)


def _adamw(model: TextGenerator, config: TrainConfig) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=config.schedule.peak, betas=config.betas, weight_decay=config.weight_decay
    )
