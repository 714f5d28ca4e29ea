"""Training on a CUDA device: every attention implementation and precision, and exact resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from transformer_kernels.models import GeneratorConfig, TextGenerator
from transformer_kernels.models.generation import generate
from transformer_kernels.training import (
    ByteWindows,
    GeneratorTask,
    Precision,
    Schedule,
    TrainConfig,
    corpus_from_bytes,
    resume,
    train,
)

pytestmark = pytest.mark.gpu

TEXT = b"the quick brown fox jumps over the lazy dog. " * 40
MODEL = GeneratorConfig(layers=2, width=64, heads=2, context=48)
CONFIG = TrainConfig(
    task=GeneratorTask(model=MODEL), steps=30, batch=8, schedule=Schedule(peak=1e-2, warmup=3),
    eval_every=15, eval_batches=2, device="cuda",
)  # fmt: skip


def data() -> ByteWindows:
    return ByteWindows(corpus_from_bytes(TEXT, "a fox"), 48)


def test_all_attention_implementations_give_the_same_losses() -> None:
    naive, fused, by_torch = (
        train(replace(CONFIG, attn_implementation=path), data()).losses
        for path in ("eager", "fused", "sdpa")
    )
    assert fused[:10] == pytest.approx(naive[:10], rel=1e-3)
    assert by_torch[:10] == pytest.approx(naive[:10], rel=1e-3)
    assert fused[-1] < 0.7 * fused[0]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_gives_similar_losses(precision: Precision) -> None:
    full = train(CONFIG, data()).losses
    half = train(replace(CONFIG, precision=precision), data()).losses
    assert half[:10] == pytest.approx(full[:10], rel=0.05)


def test_a_run_with_all_options_resumes_exactly(tmp_path: Path) -> None:
    model = replace(MODEL, dropout=0.2)
    config = replace(
        CONFIG, task=GeneratorTask(model=model), precision="bfloat16", accumulate=2, recompute=True
    )
    torch.use_deterministic_algorithms(True)
    try:
        whole = train(config, data()).losses
        stop = iter((False, True))
        train(config, data(), out=tmp_path, should_stop=lambda: next(stop))
        assert resume(tmp_path, data=data()).losses == whole
    finally:
        torch.use_deterministic_algorithms(False)


def test_generation_with_and_without_a_cache_is_the_same() -> None:
    model = TextGenerator(MODEL).cuda()
    generated = [
        list(generate(model, b"the", 60, temperature=0.0, cached=how)) for how in (True, False)
    ]
    assert generated[0] == generated[1]
