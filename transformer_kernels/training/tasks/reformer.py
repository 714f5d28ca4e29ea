"""Language modelling on bytes with a Reformer."""

from __future__ import annotations

from dataclasses import dataclass

from ...models.generator import VOCABULARY
from ...models.reformer import SIZES, Reformer, ReformerConfig
from ...nn.options import AttnImplementation
from ..config import Schedule, TrainConfig
from .generator import NextByteTask


@dataclass(frozen=True, kw_only=True)
class ReformerTask(NextByteTask):
    """Next-byte prediction on any text, by default the standard library's sources."""

    kind = "reformer"
    config_type = ReformerConfig

    model: ReformerConfig

    def __post_init__(self) -> None:
        if self.model.vocabulary < VOCABULARY:
            raise ValueError(
                f"vocabulary must be at least {VOCABULARY}, the number of bytes, "
                f"got {self.model.vocabulary}"
            )

    def build(self, attn_implementation: AttnImplementation) -> Reformer:
        return Reformer(self.model, attn_implementation=attn_implementation)


PRESETS = {
    "demo": TrainConfig(
        task=ReformerTask(model=SIZES["demo"]),
        steps=1000,
        batch=2,
        schedule=Schedule(peak=2e-3, warmup=100),
        eval_every=125,
        eval_batches=4,
    ),
    "enwik8": TrainConfig(
        task=ReformerTask(model=SIZES["enwik8"]),
        steps=20_000,
        batch=8,
        schedule=Schedule(peak=1e-3, warmup=2000),
        eval_every=500,
    ),
}
"""Presets of the byte-level Reformer. enwik8 has the paper's batch size and steps; its optimizer,
Adafactor, is AdamW here, with a learning rate of ours."""
