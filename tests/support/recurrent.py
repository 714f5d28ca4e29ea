"""Task of a toy model whose state is the text that it has read, so that tests can compare both."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from transformer_kernels.nn import AttnImplementation
from transformer_kernels.training import Batch, Dataset, load_corpus
from transformer_kernels.training.data import ByteLanes
from transformer_kernels.training.task import (
    Extra,
    RecurrentTask,
    Shapes,
    State,
    cross_entropy_sum,
)


@dataclass(frozen=True, kw_only=True)
class RecentBytesConfig:
    width: int = 8
    context: int = 12
    memory: int = 30
    dropout: float = 0.0


class RecentBytes(nn.Module):
    """Language model that sees the current byte, and the mean of the last `memory` bytes."""

    def __init__(self, config: RecentBytesConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(256, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.logits = nn.Linear(config.width, 256)

    def forward(self, tokens: Tensor, recent: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """tokens (B, T), recent (B, N) -> logits (B, T, 256), and the new recent bytes."""
        x = self.embedding(tokens)
        if recent is not None:
            x = x + self.embedding(recent.long()).mean(dim=1, keepdim=True)
        seen = tokens.to(x.dtype) if recent is None else torch.cat((recent, tokens), dim=1)
        return self.logits(self.dropout(x)), seen[:, -self.config.memory :].to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class RecentBytesTask(RecurrentTask):
    kind = "recent-bytes"
    unit = "bytes"
    score_name = "bits/byte"

    model: RecentBytesConfig

    def data(self, source: Path | None = None, extra: Extra | None = None) -> ByteLanes:
        return ByteLanes(load_corpus(source), self.model.context)

    def build(self, attn_implementation: AttnImplementation) -> RecentBytes:
        return RecentBytes(self.model)

    def tokens(self, batch: Batch) -> int:
        return batch["tokens"][:, 1:].numel()

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"next byte": self.tokens(batch)}

    def carry(
        self, model: nn.Module, batch: Batch, state: State
    ) -> tuple[dict[str, Tensor], State]:
        tokens = batch["tokens"]
        logits, recent = model(tokens[:, :-1], *state)
        return {"next byte": cross_entropy_sum(logits, tokens[:, 1:])}, (recent,)

    def state_shapes(self, lanes: int, segments: int) -> Shapes:
        return ((lanes, min(self.model.memory, segments * self.model.context)),)

    def score(
        self, model: nn.Module, data: Dataset, batches: Iterable[Batch], loss: float
    ) -> float:
        return loss / math.log(2)
