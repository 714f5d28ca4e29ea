"""Training steps of the reference models: naive attention, torch's and ours.

A step is forward, backward and optimizer. Memory is the peak of a step beyond weights, gradients
and optimizer state. `error` is the difference of the first loss from that of the first
implementation, relative.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.runner import target
from benchmarks.runner.checks import Sizes
from benchmarks.runner.run import Comparison, Measurement, NotMeasuredError, Run
from transformer_kernels.backends.native.cuda_support import runs_hopper
from transformer_kernels.bench.contenders import Contender
from transformer_kernels.bench.workload import Workload
from transformer_kernels.nn import AttnImplementation
from transformer_kernels.training import PRESETS, TrainConfig, Trainer

LOSS_BAND = 0.01
"""Largest relative difference of the first losses."""
CONTEXTS, TOKENS = (512, 1024, 2048, 4096), 4096
"""Contexts of the small GPT-2, with so many tokens in a step."""


def comparisons() -> Iterator[Comparison]:
    for kind, named in PRESETS.items():
        preset, config = next(iter(named.items()))
        if kind != "lookup":
            yield _comparison(f"{kind} {preset}", config)
    for context in CONTEXTS:
        yield _comparison("gpt2 demo", with_context(PRESETS["gpt2"]["demo"], context, TOKENS))
    preset, part = ("demo", 16) if target.IS_REHEARSAL else ("gpt2", 1)
    gpt2 = replace(PRESETS["gpt2"][preset], precision="bfloat16", device=target.DEVICE.type)
    for context in (1024, 4096):
        yield _comparison("gpt2 gpt2", with_context(gpt2, context // part, 16_384 // part))


def with_context(config: TrainConfig, context: int, tokens: int) -> TrainConfig:
    """Returns the configuration with another context, and so many tokens in a step."""
    task = replace(config.task, model=replace(config.task.model, context=context))
    return replace(config, task=task, batch=max(1, tokens // context), accumulate=1)


def _comparison(model: str, config: TrainConfig) -> Comparison:
    return Comparison(
        name=f"{model}-{config.task.model.context}-{config.precision}-{config.device}",
        measurements=partial(steps, model, config),
        device=torch.device(config.device),
    )


def steps(model: str, config: TrainConfig, run: Run) -> Iterator[Measurement]:
    """Measures steps with each implementation that has the memory.

    Raises:
        AssertionError: the first losses differ by more than LOSS_BAND.
    """
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise NotMeasuredError("torch finds no CUDA device")
    case = sizes_of(model, config)
    data = config.task.data()
    first: float | None = None
    contenders = []
    for path, variant in variants(device).items():
        if variant not in run.variants:
            continue
        try:
            trainer = Trainer(replace(config, attn_implementation=path), data)
            loss = trainer.step().loss
        except torch.cuda.OutOfMemoryError as full:
            reason = str(full).split("\n")[0]
            run.skipped.append(f"{model}, {case.N}: {variant}: {reason}")
            continue
        first = loss if first is None else first
        error = abs(loss / first - 1.0)
        assert error <= LOSS_BAND, f"{model}, {variant}: loss {loss}, expected {first}"
        contenders.append(Contender(case, "step", variant, partial(_step_of, trainer), error))
    yield run.timed(contenders)


def _step_of(trainer: Trainer) -> Workload:
    return trainer.step


def variants(device: torch.device) -> dict[AttnImplementation, str]:
    """Names of the implementations in recorded rows; naive attention is first."""
    hopper = device.type == "cuda" and runs_hopper(device)
    ours = "cpu" if device.type == "cpu" else "cuda_sm90" if hopper else "cuda_sm80"
    return {"eager": "naive", "sdpa": "sdpa", "fused": ours}


def sizes_of(model: str, config: TrainConfig) -> Sizes:
    """Columns of the rows: the sizes of the model's self-attention, as far as it has one kind."""
    sizes = config.task.model
    heads = getattr(sizes, "heads", 0)
    D = getattr(sizes, "width", 0) // heads if heads else 0
    name = f"{model}, recompute" if config.recompute else model
    return Sizes(
        name=name, B=config.batch, H_q=heads, H_kv=heads, M=sizes.context, N=sizes.context,
        D=D, D_v=D, dtype=getattr(torch, config.precision), device=torch.device(config.device),
        dropout_p=getattr(sizes, "dropout", 0.0),
    )  # fmt: skip
