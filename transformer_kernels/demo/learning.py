"""The second part: the same small generator trained twice, with naive and with fused attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from transformer_kernels.bench import peak_extra_bytes
from transformer_kernels.nn.options import AttentionPath
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


def train_side_by_side(
    config: TrainConfig,
    data: Dataset,
    paths: tuple[AttentionPath, ...],
    *,
    seconds: float,
    on_step: OnStep,
) -> dict[str, Learned]:
    """Trains one model a path, from the same seed, a step of each in turn.

    Taking turns makes their times comparable on a machine whose speed drifts; see `bench.timer`.
    The losses are those of separate runs as long as the model draws no dropout. Ends early, after
    the same number of steps for all, when `seconds` are over.
    """
    deadline = time.perf_counter() + seconds
    configs = {path: replace(config, attention=path) for path in paths}
    peaks = {path: step_peak_bytes(one, data) for path, one in configs.items()}
    runs = {path: TrainingRun.start(one, data) for path, one in configs.items()}
    for _ in range(config.steps):
        results = {path: run.train(should_stop=lambda: True) for path, run in runs.items()}
        on_step({path: result.rows[-1] for path, result in results.items()})
        if time.perf_counter() > deadline:
            break
    return {path: Learned(results[path], peaks[path]) for path in paths}


def step_peak_bytes(config: TrainConfig, data: Dataset) -> int | None:
    """The most that a training step holds beyond the model, its gradients and its optimizer."""
    trainer = Trainer(config, data)
    return peak_extra_bytes(lambda: trainer.step)
