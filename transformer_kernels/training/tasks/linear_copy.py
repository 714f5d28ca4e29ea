"""The copy task with a Linear Transformer."""

from __future__ import annotations

from dataclasses import dataclass

from ...models.linear_transformer import SIZES, LinearTransformer, LinearTransformerConfig
from ...nn.options import AttnImplementation
from ..config import Schedule, TrainConfig
from .copying import CopyTask


@dataclass(frozen=True, kw_only=True)
class LinearCopyTask(CopyTask):
    """Copies a word of random symbols: a test of whether a sum over all keys separates them."""

    kind = "linear-copy"
    config_type = LinearTransformerConfig

    model: LinearTransformerConfig

    def build(self, attn_implementation: AttnImplementation) -> LinearTransformer:
        return LinearTransformer(self.model, attn_implementation=attn_implementation)


PRESETS = {
    "demo": TrainConfig(
        task=LinearCopyTask(model=SIZES["copy"]),
        steps=400,
        batch=32,
        schedule=Schedule(peak=2e-3, warmup=50, final_share=1.0),
        eval_every=50,
        eval_batches=8,
    ),
}
