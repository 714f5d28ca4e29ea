"""The second part of the demo: one GPT-2, trained with naive and with fused attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from transformer_kernels.bench import peak_extra_bytes
from transformer_kernels.nn.options import AttnImplementation
from transformer_kernels.training import (
    CurveRow,
    Dataset,
    TrainConfig,
    Trainer,
    TrainingRun,
    TrainResult,
)

OnStep = Callable[[Mapping[str, CurveRow]], None]


@dataclass(frozen=True)
class Learned:
    """One run, and the peak memory of a training step."""

    result: TrainResult
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long to train."""

    side_by_side: int
    """Steps that all runs do"""
    turns_seconds: float
    """After this time the runs stop taking turns, whatever the number of steps."""
    seconds: float
    """After this time the training ends."""


def train_side_by_side(
    config: TrainConfig,
    data: Dataset,
    paths: tuple[AttnImplementation, ...],
    *,
    limits: Limits,
    on_step: OnStep,
) -> dict[str, Learned]:
    """Trains one model per path from the same seed: a step of each in turns, then the last alone.

    Taking turns makes their times comparable on a machine whose speed drifts; see `bench.timer`.
    The losses are those of separate runs as long as the model draws no dropout. All runs stop
    taking turns after the same number of steps; the last path then trains on to `config.steps`.
    """
    start = time.perf_counter()
    configs = {path: replace(config, attn_implementation=path) for path in paths}
    peaks = {path: step_peak_bytes(one, data) for path, one in configs.items()}
    runs = {path: TrainingRun.start(one, data) for path, one in configs.items()}
    results: dict[AttnImplementation, TrainResult] = {}
    for step in range(1, config.steps + 1):
        now = {path: run.train(should_stop=lambda: True) for path, run in runs.items()}
        on_step({path: result.rows[-1] for path, result in now.items()})
        results |= now
        elapsed = time.perf_counter() - start
        if elapsed > limits.seconds:
            break
        if step >= limits.side_by_side or elapsed > limits.turns_seconds:
            runs = {paths[-1]: runs[paths[-1]]}
    return {path: Learned(results[path], peaks[path]) for path in paths}


def step_peak_bytes(config: TrainConfig, data: Dataset) -> int | None:
    """The most that a training step holds beyond the model, its gradients and its optimizer."""
    trainer = Trainer(config, data)
    return peak_extra_bytes(lambda: trainer.step)
