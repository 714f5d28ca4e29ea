"""Language modelling on bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ...dispatch.division import own_tokens
from ...models.generator import SIZES, GeneratorConfig, TextGenerator
from ...nn.options import AttnImplementation
from ..config import Schedule, TrainConfig
from ..data import Batch, ByteWindows, Dataset, load_corpus
from ..losses import cross_entropy_sum
from ..task import Extra, Task


class NextByteTask(Task):
    """Base of the tasks that predict the next byte of windows of a text."""

    unit = "bytes"
    score_name = "bits/byte"

    def data(self, source: Path | None = None, extra: Extra | None = None) -> ByteWindows:
        return ByteWindows(load_corpus(source), self.model.context)

    def tokens(self, batch: Batch) -> int:
        return batch["tokens"][:, 1:].numel()

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"next byte": self.tokens(batch)}

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"next byte": next_token_loss(model, batch["tokens"])}

    def score(
        self, model: nn.Module, data: Dataset, batches: Iterable[Batch], loss: float
    ) -> float:
        return loss / math.log(2)


@dataclass(frozen=True, kw_only=True)
class GeneratorTask(NextByteTask):
    """Next-byte prediction on any text, by default the standard library's sources."""

    kind = "generator"
    scales_out = True
    config_type = GeneratorConfig

    model: GeneratorConfig

    def build(self, attn_implementation: AttnImplementation) -> TextGenerator:
        return TextGenerator(self.model, attn_implementation=attn_implementation)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Sum of the next-token cross entropies of tokens (B, T + 1), without the first, in nats.

    Under a division of sequences, the sum of this rank's share of them.
    """
    inputs, targets = (own_tokens(x, 1) for x in (tokens[:, :-1], tokens[:, 1:]))
    return cross_entropy_sum(model(inputs), targets)


PRESETS = {
    "nanogpt-cpu": TrainConfig(
        task=GeneratorTask(model=SIZES["nanogpt-cpu"]),
        schedule=Schedule(peak=1e-3, warmup=100),
    ),
    "demo": TrainConfig(
        task=GeneratorTask(model=SIZES["demo"]),
        steps=300,
        batch=4,
        schedule=Schedule(peak=2e-3, warmup=30),
        eval_every=50,
        eval_batches=8,
    ),
    "seed": TrainConfig(
        task=GeneratorTask(model=SIZES["seed"]),
        steps=170_000,
        batch=32,
        schedule=Schedule(peak=1e-4, warmup=5000),
        betas=(0.9, 0.999),
        weight_decay=0.0,
        eval_every=1000,
    ),
}
"""Presets of the byte-level generator; the names are those of the model's sizes.

nanogpt-cpu is nanoGPT's laptop setting (config/train_shakespeare_char with its CPU overrides). seed
has the batch size and steps of the model's source.
"""
