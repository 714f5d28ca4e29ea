"""Part two of the demo: one GPT-2, trained with eager and with fused attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..bench import peak_extra_bytes
from ..nn.options import AttnImplementation
from ..training import CurveRow, Dataset, TrainConfig, Trainer, TrainingRun, TrainResult

OnStep = Callable[[Mapping[str, CurveRow]], None]


@dataclass(frozen=True)
class MeasuredRun:
    """Result of one run, and the peak memory of a training step in bytes."""

    result: TrainResult
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the training time."""

    interleaved_steps: int
    """Number of steps in which all runs alternate"""
    interleaved_seconds: float
    """Time after which the runs stop alternating, whatever the number of steps"""
    total_seconds: float
    """Time after which the training ends"""


def train_interleaved(
    config: TrainConfig,
    data: Dataset,
    implementations: tuple[AttnImplementation, ...],
    *,
    limits: Limits,
    on_step: OnStep,
) -> dict[str, MeasuredRun]:
    """Trains one model per attention implementation from the same seed, alternating step by step.

    Interleaving makes the times comparable on a machine whose speed drifts; see `bench.timer`. The
    losses equal those of separate runs if the model uses no dropout. After the interleaved steps
    only the last implementation trains on, up to `config.steps`.

    Args:
        config: settings of the run; `attn_implementation` is overridden.
        data: dataset of all runs.
        implementations: attention implementations to train with.
        limits: limits in steps and seconds.
        on_step: called after each round with the last curve row of each active run.

    Returns:
        the measured run of each implementation.
    """
    start = time.perf_counter()
    configs = {name: replace(config, attn_implementation=name) for name in implementations}
    peaks = {name: step_peak_bytes(run_config, data) for name, run_config in configs.items()}
    runs = {name: TrainingRun.start(run_config, data) for name, run_config in configs.items()}
    results: dict[AttnImplementation, TrainResult] = {}
    for step in range(1, config.steps + 1):
        latest = {name: run.train(should_stop=lambda: True) for name, run in runs.items()}
        on_step({name: result.rows[-1] for name, result in latest.items()})
        results |= latest
        elapsed = time.perf_counter() - start
        if elapsed > limits.total_seconds:
            break
        if step >= limits.interleaved_steps or elapsed > limits.interleaved_seconds:
            runs = {implementations[-1]: runs[implementations[-1]]}
    return {name: MeasuredRun(results[name], peaks[name]) for name in implementations}


def step_peak_bytes(config: TrainConfig, data: Dataset) -> int | None:
    """Peak memory of a training step beyond the model, its gradients and its optimizer, in bytes.

    None where the system cannot measure it.
    """
    trainer = Trainer(config, data)
    return peak_extra_bytes(lambda: trainer.step)
