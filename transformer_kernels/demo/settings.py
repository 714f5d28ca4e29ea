"""Problem sizes and time limits of the demo."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..bench import Budget
from ..models import GPT2Config
from ..training import PRESETS, Schedule, TrainConfig
from ..training.tasks.gpt2 import GPT2Task
from .learning import Limits


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Sizes of the two parts: attention alone, and a GPT-2 trained with it."""

    lengths: tuple[int, ...]
    """Sequence lengths of the causal float32 cases, batch size 1"""
    masked_length: int
    """Sequence length of the cases with other masks and dtypes; divisible by 8"""
    heads: int
    width: int
    """Head dimension"""
    budget: Budget
    """Timing budget of a case and direction, shared by all variants"""
    speed_seconds: float
    """Time limit of part one; cases expected to exceed it are skipped"""
    training: TrainConfig
    limits: Limits
    sample_tokens: int
    prompt: bytes = b"\n    def"
    """Ends with a whole token: a space belongs to the word after it"""
    temperature: float = 0.5


def _training(model: GPT2Config, *, steps: int, batch: int, eval_every: int) -> TrainConfig:
    return replace(
        PRESETS["gpt2"]["demo"],
        task=GPT2Task(model=model),
        steps=steps,
        batch=batch,
        schedule=Schedule(peak=2e-3, warmup=steps // 10),
        eval_every=eval_every,
        eval_batches=8,
    )


FULL = DemoSettings(
    lengths=(512, 1024, 2048, 4096),
    masked_length=2048,
    heads=8,
    width=64,
    budget=Budget(seconds=1.5, fewest=3, most=20),
    speed_seconds=95.0,
    training=_training(
        GPT2Config(vocabulary=4096, context=512, layers=4, heads=4, width=128, dropout=0.0),
        steps=480,
        batch=2,
        eval_every=50,
    ),
    limits=Limits(interleaved_steps=20, interleaved_seconds=60.0, total_seconds=120.0),
    sample_tokens=160,
)
"""Sizes of `make demo`: two to three and a half minutes on two cores, after its set-up. A slow or
busy machine skips cases and steps, and takes little longer. The schedule of the training ends
within its time limit, so that the text sample is that of a finished run. 20 interleaved steps
suffice for the ratio of the times; the rest of the time belongs to the fused model."""

QUICK = DemoSettings(
    lengths=(32, 64),
    masked_length=64,
    heads=2,
    width=16,
    budget=Budget(seconds=0.1, fewest=2, most=3),
    speed_seconds=math.inf,
    training=_training(
        GPT2Config(vocabulary=2048, context=32, layers=1, heads=2, width=16, dropout=0.0),
        steps=6,
        batch=2,
        eval_every=2,
    ),
    limits=Limits(interleaved_steps=4, interleaved_seconds=60.0, total_seconds=60.0),
    sample_tokens=8,
)
"""Every part of the demo at toy sizes: a functional check, not a measurement."""
