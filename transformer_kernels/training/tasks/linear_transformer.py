"""Language modelling on bytes with a Linear Transformer."""

from __future__ import annotations

from dataclasses import dataclass

from ...models.generator import VOCABULARY
from ...models.linear_transformer import SIZES, LinearTransformer, LinearTransformerConfig
from ...nn.options import AttnImplementation
from ..config import Schedule, TrainConfig
from .generator import NextByteTask


@dataclass(frozen=True, kw_only=True)
class LinearTransformerTask(NextByteTask):
    """Next-byte prediction on any text, by default the standard library's sources."""

    kind = "linear"
    config_type = LinearTransformerConfig

    model: LinearTransformerConfig

    def __post_init__(self) -> None:
        if self.model.vocabulary < VOCABULARY:
            raise ValueError(
                f"vocabulary must be at least {VOCABULARY}, the number of bytes, "
                f"got {self.model.vocabulary}"
            )

    def build(self, attn_implementation: AttnImplementation) -> LinearTransformer:
        return LinearTransformer(self.model, attn_implementation=attn_implementation)


PRESETS = {
    name: TrainConfig(
        task=LinearTransformerTask(model=SIZES[name]),
        steps=1000,
        batch=4096 // SIZES[name].context,
        schedule=Schedule(peak=2e-3, warmup=100),
        eval_every=125,
        eval_batches=4,
    )
    for name in ("demo", "learned")
}
"""Presets of the byte-level Linear Transformer; the names are those of the model's sizes."""
