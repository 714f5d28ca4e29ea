"""The attention of a toy GPT and of well-known models on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.runner.ceilings import ceilings
from benchmarks.runner.checks import SLOW_SCORES
from benchmarks.runner.run import Comparison, Measurement, Run
from transformer_kernels.bench import Row
from transformer_kernels.bench.comparison.calls import Call, Shape
from transformer_kernels.bench.comparison.run import measure_call

MODELS = (
    ("GPT of four heads, two texts", "2,4,4,32,32,64", "causal"),
    ("Swin-B, first stage, four images", "256,4,4,49,49,32", "full"),
    ("ViT-B/16, eight images", "8,12,12,197,197,64", "full"),
    ("BERT-base, eight texts", "8,12,12,128,128,64", "padding:128,110,96,80,64,48,32,20"),
    ("GPT-2", "1,12,12,1024,1024,64", "causal"),
    ("Llama 3 8B, prefill", "1,32,8,2048,2048,128", "causal"),
    ("Llama 3 8B, one token", "1,32,8,1,2048,128", "full"),
    ("Whisper small, encoder", "1,12,12,1500,1500,64", "full"),
    ("Whisper small, cross-attention", "1,12,12,64,1500,64", "full"),
    ("Stable Diffusion 1.5, first level", "2,8,8,4096,4096,40", "full"),
    ("Stable Diffusion 1.5, text", "2,8,8,4096,77,40", "full"),
    ("Mistral 7B, an eighth of its heads", "1,4,1,8192,8192,128", "window:4096"),
    ("Gemma 3 4B, layer with a window", "1,8,4,2048,2048,256", "window:1024"),
)
"""Names, shapes and masks. Heads, widths and windows are those of the models; batches and contexts
are chosen for a CPU."""


def calls() -> Iterator[Call]:
    for name, shape, mask in MODELS:
        for dtype in (torch.float32, torch.bfloat16):
            yield Call(name=name, shape=Shape.parse(shape), mask=mask, dtype=dtype)


def comparisons() -> Iterator[Comparison]:
    for call in calls():
        name = f"{call.name}-{call.dtype_name}"
        yield Comparison(name=name, measurements=partial(_measurements, call))


def _measurements(call: Call, run: Run) -> Iterator[Measurement]:
    def measure(suite: str) -> list[Row]:
        result = measure_call(
            call,
            run.usable(),
            run.budget,
            run.provenance,
            suite=suite,
            besides=ceilings,
            naive_scores=SLOW_SCORES,
        )
        assert not result.broken, result.broken
        return [one.row for one in result.measured]

    yield measure
