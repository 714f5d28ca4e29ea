"""Language modelling on bytes with memories of earlier segments."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ...models.generator import VOCABULARY
from ...models.transformer_xl import SIZES, TransformerXL, TransformerXLConfig
from ...nn.options import AttnImplementation
from ..config import Schedule, TrainConfig
from ..data import Batch, ByteLanes, Dataset, load_corpus
from ..losses import cross_entropy_sum
from ..task import Extra, RecurrentTask, Shapes, State


@dataclass(frozen=True, kw_only=True)
class TransformerXLTask(RecurrentTask):
    """Next-byte prediction on any text, by default the standard library's sources.

    Trains on the segments of a text in order, and carries the memories of each lane. Holds out the
    same bytes as `GeneratorTask`.
    """

    kind = "transformer-xl"
    unit = "bytes"
    score_name = "bits/byte"
    config_type = TransformerXLConfig

    model: TransformerXLConfig

    def __post_init__(self) -> None:
        if self.model.vocabulary != VOCABULARY:
            raise ValueError(
                f"vocabulary must be {VOCABULARY}, the number of bytes, got {self.model.vocabulary}"
            )

    def data(self, source: Path | None = None, extra: Extra | None = None) -> ByteLanes:
        return ByteLanes(load_corpus(source), self.model.context)

    def build(self, attn_implementation: AttnImplementation) -> TransformerXL:
        return TransformerXL(self.model, attn_implementation=attn_implementation)

    def tokens(self, batch: Batch) -> int:
        return batch["tokens"][:, 1:].numel()

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"next byte": self.tokens(batch)}

    def carry(
        self, model: nn.Module, batch: Batch, state: State
    ) -> tuple[dict[str, Tensor], State]:
        tokens = batch["tokens"]
        logits, memories = model(tokens[:, :-1], state or None)
        return {"next byte": cross_entropy_sum(logits, tokens[:, 1:])}, memories

    def state_shapes(self, lanes: int, segments: int) -> Shapes:
        length = min(self.model.memory, segments * self.model.context)
        return ((lanes, length, self.model.width),) * self.model.layers

    def score(
        self, model: nn.Module, data: Dataset, batches: Iterable[Batch], loss: float
    ) -> float:
        return loss / math.log(2)


PRESETS = {
    "demo": TrainConfig(
        task=TransformerXLTask(
            model=TransformerXLConfig(
                layers=3, heads=4, width=96, context=64, memory=64, dropout=0.0
            )
        ),
        steps=2000,
        batch=12,
        schedule=Schedule(peak=2e-3, warmup=100),
    ),
    "enwik8-base": TrainConfig(
        task=TransformerXLTask(model=SIZES["enwik8-base"]),
        steps=400_000,
        batch=22,
        schedule=Schedule(peak=2.5e-4, warmup=0, final_share=0.0),
        betas=(0.9, 0.999),
        weight_decay=0.0,
        clip=0.25,
        eval_every=4000,
    ),
    "enwik8-large": TrainConfig(
        task=TransformerXLTask(model=SIZES["enwik8-large"]),
        steps=400_000,
        batch=64,
        schedule=Schedule(peak=2.5e-4, warmup=4000, final_share=0.0),
        betas=(0.9, 0.999),
        weight_decay=0.0,
        clip=0.25,
        eval_every=4000,
    ),
}
"""Presets of the byte-level Transformer-XL. Those of enwik8 have the batch size, steps, learning
rate and clipping of the authors' scripts (kimiyoung/transformer-xl, pytorch/run_enwik8_*.sh)."""
