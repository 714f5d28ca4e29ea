"""Language modelling on bytes with a Sparse Transformer."""

from __future__ import annotations

from dataclasses import dataclass

from ...models.sparse_transformer import SIZES, SparseTransformer, SparseTransformerConfig
from ...nn.options import AttnImplementation
from ..config import Schedule, TrainConfig
from .generator import NextByteTask


@dataclass(frozen=True, kw_only=True)
class SparseTransformerTask(NextByteTask):
    """Next-byte prediction on any text, by default the standard library's sources."""

    kind = "sparse"
    config_type = SparseTransformerConfig

    model: SparseTransformerConfig

    def build(self, attn_implementation: AttnImplementation) -> SparseTransformer:
        return SparseTransformer(self.model, attn_implementation=attn_implementation)


PRESETS = {
    "demo": TrainConfig(
        task=SparseTransformerTask(model=SIZES["demo"]),
        steps=1000,
        batch=1,
        schedule=Schedule(peak=2e-3, warmup=100),
        eval_every=125,
        eval_batches=4,
    ),
    "enwik8": TrainConfig(
        task=SparseTransformerTask(model=SIZES["enwik8"]),
        steps=73_200,
        batch=8,
        schedule=Schedule(peak=3.5e-4, warmup=5000, final_share=0.0),
        betas=(0.9, 0.999),
        weight_decay=0.01,
        clip=1.0,
        eval_every=500,
    ),
}
"""Presets of the byte-level Sparse Transformer. enwik8 has the paper's learning rate, warm-up,
weight decay, clipping and 80 epochs of 90 MB; the batch size is ours, as the paper gives none."""
