"""How much the demo does."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformer_kernels.bench import Budget
from transformer_kernels.models.generator import GeneratorConfig
from transformer_kernels.training import PRESETS, GeneratorTask, TrainConfig


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Sizes of the two parts: attention by itself, and a model trained with it."""

    lengths: tuple[int, ...]
    """Queries and keys of the attention that is measured; causal, float32, one batch entry"""
    heads: int
    width: int
    """Of a head"""
    budget: Budget
    """For each length and direction, all variants together"""
    speed_seconds: float
    """A length that would end later is left out."""
    training: TrainConfig
    training_seconds: float
    """Both runs together; steps that would begin later are left out."""
    prompt: bytes
    sample_bytes: int
    temperature: float = 0.7


FULL = DemoSettings(
    lengths=(256, 512, 1024, 2048, 4096),
    heads=8,
    width=64,
    budget=Budget(seconds=3.0, most=30),
    speed_seconds=120.0,
    training=replace(PRESETS["generator"]["demo"], steps=500, eval_every=100),
    training_seconds=140.0,
    prompt=b"def ",
    sample_bytes=400,
)
"""For `make demo`: some three minutes on two idle cores; on a slow or busy machine it does less,
so as to end within six."""

QUICK = DemoSettings(
    lengths=(32, 64),
    heads=2,
    width=16,
    budget=Budget(seconds=0.1, fewest=2, most=3),
    speed_seconds=60.0,
    training=replace(
        PRESETS["generator"]["demo"],
        task=GeneratorTask(model=GeneratorConfig(layers=1, width=16, heads=2, context=32)),
        steps=4,
        batch=2,
        eval_every=2,
        eval_batches=1,
    ),
    training_seconds=60.0,
    prompt=b"def ",
    sample_bytes=16,
)
"""Every part of it, too small to mean anything."""
