"""Settings of a run, and the named ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from transformer_kernels.models import SIZES
from transformer_kernels.training import PRESETS, GeneratorTrainer, TrainConfig, corpus_from_bytes


def test_presets_go_with_the_sizes() -> None:
    assert {name: preset.model for name, preset in PRESETS.items()} == SIZES


def test_nanogpt_cpu_is_nanogpts_setting() -> None:
    preset = PRESETS["nanogpt-cpu"]
    assert (preset.batch, preset.steps, preset.model.dropout) == (12, 2000, 0.0)
    assert preset.schedule.learning_rate(99, 2000) == 1e-3
    assert preset.schedule.learning_rate(1999, 2000) == pytest.approx(1e-4)
    assert (preset.clip, preset.weight_decay, preset.betas) == (1.0, 0.1, (0.9, 0.99))


def test_the_seeds_run_is_as_long_as_its_source_says() -> None:
    assert (PRESETS["seed"].batch, PRESETS["seed"].steps) == (32, 170_000)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS.keys())
def test_a_config_goes_through_plain_values(preset: TrainConfig) -> None:
    assert TrainConfig.from_dict(preset.to_dict()) == preset


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"batch": -1}, "batch must be a whole number of at least 1, got -1"),
        ({"eval_every": 0}, "eval_every must be a whole number of at least 1, got 0"),
        ({"clip": 0.0}, "clip must be above 0, got 0.0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
        ({"seed": -1}, "seed must be at least 0 and below 2\\*\\*63, got -1"),
        ({"attention": "x"}, "attention must be one of 'naive', 'fused', 'torch', got 'x'"),
    ],
)
def test_wrong_settings_are_named(
    config: TrainConfig, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(config, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_device_that_is_not_there_is_named(config: TrainConfig, device: str) -> None:
    corpus = corpus_from_bytes(bytes(1000), "zeros")
    with pytest.raises(ValueError, match=f"device '{device}' cannot be used: "):
        GeneratorTrainer(replace(config, device=device), corpus)
