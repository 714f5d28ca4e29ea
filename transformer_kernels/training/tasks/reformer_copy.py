"""The copy task with a Reformer."""

from __future__ import annotations

from dataclasses import dataclass

from ...models.reformer import SIZES, Reformer, ReformerConfig
from ...nn.options import AttnImplementation
from ..config import Schedule, TrainConfig
from .copying import CopyTask


@dataclass(frozen=True, kw_only=True)
class ReformerCopyTask(CopyTask):
    """Copies a word of random symbols: a test of whether hashing finds the one key that matters."""

    kind = "reformer-copy"
    config_type = ReformerConfig

    model: ReformerConfig

    def build(self, attn_implementation: AttnImplementation) -> Reformer:
        return Reformer(self.model, attn_implementation=attn_implementation)


PRESETS = {
    "demo": TrainConfig(
        task=ReformerCopyTask(model=SIZES["copy"]),
        steps=400,
        batch=32,
        schedule=Schedule(peak=2e-3, warmup=50, final_share=1.0),
        eval_every=50,
        eval_batches=8,
    ),
}
